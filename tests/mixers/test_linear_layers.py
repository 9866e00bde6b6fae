"""Linear layers of our models, of which a decode step takes other products than a pass."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from dist_attn.mixers.linear_layers import STEP_ROWS, Linear, linear_layer


@pytest.mark.parametrize("shape", [(1,), (STEP_ROWS,), (STEP_ROWS + 1,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_steps_and_passes_are_the_same_layer(shape: tuple[int, ...], bias: bool) -> None:
    """Whatever the shape and the bias, outputs are those of the weights in float64."""
    layer = Linear(40, 24, bias=bias)
    x = torch.randn(*shape, 40)
    want = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-5)


def test_a_step_that_is_trained_has_gradients_of_everything() -> None:
    """Where gradients are asked for, inputs, weights and biases have them."""
    layer, x = Linear(8, 4).double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, b: linear_layer(x, w, b), (x, layer.weight, layer.bias))
    x_float = torch.randn(3, 8)
    own = Linear(8, 4)
    own(x_float).sum().backward()
    torch.testing.assert_close(own.weight.grad, x_float.sum(0).expand(4, 8))


def test_autocast_decides_the_type_of_a_step() -> None:
    """Under autocast a step computes in its type, as a pass does."""
    layer, x = Linear(8, 4), torch.randn(3, 8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_wrong_width_is_refused_in_torchs_words() -> None:
    """No kernel reads behind the inputs of a step or of a pass."""
    layer = Linear(40, 24)
    for shape in ((2, 41), (2, 32, 8)):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 40), (600, 40)], ids=["step", "pass"])
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_what_has_no_plain_memory_is_left_to_torch(shape: tuple[int, int]) -> None:
    """Tangents, mapped, negated, traced and fake tensors give what torch's layer gives."""
    x, t, w = torch.randn(shape), torch.randn(shape), torch.randn(2048, 40)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(linear_layer(forward_ad.make_dual(x, t), w)).tangent
    torch.testing.assert_close(tangent, t @ w.T)
    mapped = torch.vmap(lambda one, w: linear_layer(one[None], w)[0], in_dims=(0, None))(x, w)
    torch.testing.assert_close(mapped, x @ w.T)
    torch.testing.assert_close(linear_layer(torch._neg_view(x), w), -x @ w.T)
    traced = torch.jit.trace(lambda x: linear_layer(x, w), x)
    torch.testing.assert_close(traced(t), t @ w.T)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert linear_layer(mode.from_tensor(x), w).shape == (shape[0], 2048)


def test_a_layer_may_have_no_outputs() -> None:
    """Its result is empty, as torch's is."""
    with torch.inference_mode():
        assert linear_layer(torch.randn(3, 40), torch.empty(0, 40)).shape == (3, 0)
