"""The short depthwise convolution: against the oracle, the golden vector, and itself in pieces."""

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn.ops import convolve, convolve_streaming
from dist_attn.ops.convolution import convolve_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("length", "taps"), [(10, 1), (10, 4), (3, 5), (0, 3), (9, 9)])
def test_direct_equals_oracle(length, taps, centred):
    """Output and gradients equal the oracle's, also with more taps than tokens."""
    results = []
    for function in (convolve_naive, convolve):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(2, length, 3, generator=g, dtype=torch.float64, requires_grad=True)
        w = torch.randn(taps, 3, generator=g, dtype=torch.float64, requires_grad=True)
        y = function(x, w, centred=centred)
        if length:
            y.square().sum().backward()
        results.append((y, x.grad, w.grad))
    for got, want in zip(results[1], results[0], strict=True):
        if want is not None:
            assert_close(got, want)


def test_second_derivatives():
    """Gradients have gradients of their own, those of differences."""
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(convolve, (x, w))


def test_golden():
    """The golden causal convolution comes out."""
    g = golden("conv")
    assert_close(convolve(g["X"][None], g["w"])[0], g["y"], kind="golden")


def test_pieces_equal_the_whole():
    """A stream cut anywhere, with the tail passed on, gives the same outputs as one call."""
    x, w = torch.randn(1, 20, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    tail, outs = None, []
    for piece in x.split([1, 2, 0, 9, 8], dim=1):
        y, tail = convolve_streaming(piece, w, tail)
        outs.append(y)
    assert_close(torch.cat(outs, 1), convolve(x, w))
    assert torch.equal(tail, x[:, -3:])


def test_wrong_shapes_are_named():
    """Taps of another width, or a tail of another length or batch, raise a ShapeError."""
    for tail in ((1, 4, 3), (2, 3, 3)):
        with pytest.raises(ShapeError, match=r"needed is \[batch, K - 1, size\] = \(1, 3, 3\)"):
            convolve_streaming(torch.zeros(1, 2, 3), torch.zeros(4, 3), torch.zeros(tail))
    with pytest.raises(ShapeError, match=r"needed are x \[B, L, D\]"):
        convolve(torch.zeros(1, 2, 3), torch.zeros(4, 2))
