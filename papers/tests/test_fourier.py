"""Fourier mixing: the fast form against the oracle and the golden vectors."""

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn_papers.ops import fourier_mix
from dist_attn_papers.ops.fourier import fourier_mix_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden


@pytest.mark.parametrize("norm", [None, "ortho"])
@pytest.mark.parametrize(("length", "size"), [(1, 1), (6, 4), (7, 5), (0, 3), (64, 2)])
def test_fast_equals_oracle(length, size, norm):
    """Output and gradient equal the oracle's for any length and width."""
    results = []
    for function in (fourier_mix_naive, fourier_mix):
        x = torch.randn(2, length, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x.requires_grad_()
        y = function(x, norm=norm)
        (y.square().sum() + 0 * x.sum()).backward()
        results.append((y, x.grad))
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("shape", ["6x4", "5x7", "8x8"])
def test_golden_fnet(shape):
    """The golden FNet vectors come out, unnormalised and unitary."""
    g = golden("fnet")
    assert_close(fourier_mix(g[f"X_{shape}"][None])[0], g[f"out_{shape}"], kind="golden")
    assert_close(fourier_mix(g[f"X_{shape}"][None], norm="ortho")[0], g[f"out_unitary_{shape}"], kind="golden")


def test_another_number_of_dimensions_is_refused():
    """x without a batch raises a ShapeError."""
    with pytest.raises(ShapeError, match=r"needed is \[B, L, D\]"):
        fourier_mix(torch.zeros(3, 4))
