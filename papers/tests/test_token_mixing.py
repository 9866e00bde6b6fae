"""Token mixing: the form by matrix products against the oracle and the golden vectors."""

import pytest
import torch
import torch.nn.functional as F

from dist_attn.errors import InputError, ShapeError
from dist_attn_papers.ops import mix_tokens
from dist_attn_papers.ops.token_mixing import mix_tokens_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("biases", [False, True])
def test_products_equal_the_oracle(activation, biases):
    """Outputs and every gradient are the oracle's, with biases and without."""
    results = []
    for form in (mix_tokens_naive, mix_tokens):
        shapes = [(2, 7, 3), (7, 4), (4, 7), *([(4,), (7,)] if biases else [])]
        x, w_in, w_out, *bias = (random_tensor(*s, seed=i).requires_grad_() for i, s in enumerate(shapes))
        named = dict(zip(("bias_in_S", "bias_out_L"), bias, strict=False))
        y = form(x, w_in, w_out, activation=activation, **named)
        (y * random_tensor(*y.shape, seed=9)).sum().backward()
        results.append([y, *(t.grad for t in (x, w_in, w_out, *bias))])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("form", [mix_tokens, mix_tokens_naive])
def test_golden_mixer(form):
    """The token half of a MLP-Mixer block comes out."""
    g = golden("mixer")
    normed = F.layer_norm(g["X"], (5,), g["g1"], g["b1"], eps=1e-6)
    y = form(normed[None], g["W1"], g["W2"], bias_in_S=g["c1"], bias_out_L=g["c2"])[0]
    assert_close(g["X"] + y, g["tokens"], kind="golden")


def test_what_does_not_fit_is_named():
    """Weights of another length and unknown activations are refused in words."""
    x, w = torch.zeros(1, 5, 2), torch.zeros(5, 3)
    with pytest.raises(ShapeError, match="for 5 tokens w_in is \\[5, S\\]"):
        mix_tokens(x, torch.zeros(4, 3), w.T)
    with pytest.raises(InputError, match="gelu_tanh, gelu, relu"):
        mix_tokens(x, w, w.T, activation="swish")
