"""Long convolution: the form by spectra against the oracle and the golden vectors."""

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn.ops import convolve
from dist_attn_papers.ops import long_convolve
from dist_attn_papers.ops.long_convolution import long_convolve_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize(
    ("length", "behind", "ahead"),
    [(1, 1, None), (7, 7, 7), (33, 5, None), (33, 90, 90), (64, 1, 3), (50, 20, 1), (21, 0, 0), (0, 4, 4)],
)
def test_spectra_equal_the_oracle(length, behind, ahead):
    """Outputs and every gradient are the oracle's, for kernels shorter and longer than the sequence, both ways."""
    shapes = [(2, length, 3), (behind, 3), *([] if ahead is None else [(ahead, 3)])]
    results = []
    for convolution in (long_convolve_naive, long_convolve):
        x, kernel, *rest = (random_tensor(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
        y = convolution(x, kernel, backward_kernel_LD=rest[0] if rest else None)
        ((y * random_tensor(*y.shape, seed=9)).sum() + 0 * x.sum()).backward()
        results.append([y, *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, kernel, *rest))])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("convolution", [long_convolve, long_convolve_naive])
def test_golden_sgconv(convolution):
    """SGConv's kernels come out for sequences as long as the kernel, shorter and longer, skip connection added."""
    g = golden("sgconv")
    for kernel in ("linear_d2", "linear_dvar", "nearest_d2", "nearest_dvar"):
        for length in (20, 32, 40):
            u_LD = g[f"u{length}"].T
            y = convolution(u_LD[None], g[f"{kernel}_K"].T)[0] + g["D"] * u_LD
            assert_close(y.T, g[f"{kernel}_y{length}"], kind="golden", what=f"{kernel} {length}")


@pytest.mark.parametrize("convolution", [long_convolve, long_convolve_naive])
def test_golden_s4d(convolution):
    """S4D in convolution form, and with a second kernel that acts on the future from the next token on."""
    g = golden("s4d")
    u_LD = g["u"].T
    for kind in ("lin", "inv", "real"):
        for rule in ("zoh", "bilinear"):
            y = convolution(u_LD[None], g[f"{kind}_{rule}_K"].T)[0] + g["D"] * u_LD
            assert_close(y.T, g[f"{kind}_{rule}_y_conv"], kind="golden", what=f"{kind} {rule}")
    y = convolution(u_LD[None], g["lin_zoh_K"].T, backward_kernel_LD=g["inv_zoh_K"].T)[0] + g["D"] * u_LD
    assert_close(y.T, g["bidir_y"], kind="golden")


def test_few_taps_are_a_short_convolution():
    """With a few taps it is `convolve`."""
    x, w = random_tensor(2, 100, 3, seed=0), random_tensor(4, 3, seed=1)
    assert_close(long_convolve(x, w), convolve(x, w))


def test_single_precision_over_a_long_sequence():
    """In float32, 65,536 tokens and as many taps that fade away are within 1e-5 of float64, relative to the largest."""
    length = 1 << 16
    x = random_tensor(1, length, 1, seed=0)
    kernel = random_tensor(length, 1, seed=1) * torch.exp(-torch.arange(length, dtype=torch.float64) / 2000)[:, None]
    want = long_convolve(x, kernel)
    got = long_convolve(x.float(), kernel.float()).double()
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_half_precision_is_computed_in_single():
    """bfloat16 inputs give the float32 result, rounded once."""
    x, kernel = (random_tensor(1, 50, 2, seed=0).bfloat16(), random_tensor(50, 2, seed=1).bfloat16())
    assert torch.equal(long_convolve(x, kernel), long_convolve(x.float(), kernel.float()).bfloat16())


def test_kernels_of_other_channels_are_refused():
    """The message says which shapes are needed."""
    with pytest.raises(ShapeError, match="kernels \\[taps, D\\]"):
        long_convolve(torch.zeros(1, 4, 3), torch.zeros(4, 2))
