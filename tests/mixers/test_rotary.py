"""Rotary positions: the matrix of the paper, scores that see only distances, digits far out."""

import math

import pytest
import torch
from pydantic import ValidationError

from dist_attn.mixers import RotaryConfig, SoftmaxConfig
from dist_attn.mixers.heads import rotate
from tests.support.closeness import assert_close


def _naive(x_K: list[float], position: int, size: int, base: float) -> list[float]:
    """The turned pairs, one after the other, by the definition."""
    out, half = list(x_K), size // 2
    for i in range(half):
        angle = position * base ** (-2 * i / size)
        a, b = x_K[i], x_K[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize(("size", "base"), [(6, 10_000.0), (4, 500.0), (2, 10_000.0)])
def test_rotation_is_that_of_the_paper(size, base):
    """Every pair of every head turns by its own angle, the rest of a partly turned head stays, at 1,000,000 too."""
    x_BHLK = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions_BL = torch.tensor([[0, 1, 7, 1_000_000], [5, 6, 7, 8]])
    got = rotate(x_BHLK, positions_BL, RotaryConfig(size=size, base=base))
    for b in range(2):
        for t in range(4):
            for h in range(3):
                want = _naive(x_BHLK[b, h, t].tolist(), int(positions_BL[b, t]), size, base)
                assert_close(got[b, h, t], torch.tensor(want, dtype=torch.float64))


def test_scores_see_distances_only():
    """The product of a turned query and a turned key stays the same when both move by the same number of tokens."""
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotary = RotaryConfig(size=8)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        return (rotate(q, torch.tensor([[at_q]]), rotary) * rotate(k, torch.tensor([[at_k]]), rotary)).sum()

    assert_close(score(9, 4), score(1009, 1004))
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-3


def test_more_than_a_head_cannot_turn():
    """A rotation of more numbers than a head has, or of an odd number of them, is refused in words."""
    with pytest.raises(ValidationError, match="at most the head's size, 4"):
        SoftmaxConfig(kind="softmax", hidden_size=8, num_heads=2, rotary=RotaryConfig(size=6))
    with pytest.raises(ValidationError, match="multiple of 2"):
        RotaryConfig(size=3)
