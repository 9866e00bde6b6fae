"""Random numbers that are a function of seed and global position: the same however a sequence is cut."""

from collections.abc import Sequence

import torch

__all__ = ["logistic_noise", "uniform_at"]

# SplitMix64, whose 64-bit constants are written here as the signed numbers that torch knows.
GOLDEN_GAMMA, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
MASK_53 = (1 << 53) - 1


def uniform_at(position_L: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Numbers in (0, 1), one for each position, [L] float64.

    Reference: Steele et al. 2014, Fast Splittable Pseudorandom Number Generators (SplitMix64).
    """
    state_L = position_L.to(torch.int64)
    for seed in seeds:
        # As a signed 64-bit number, whatever was given.
        folded = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        state_L = _mixed(state_L ^ _mixed(torch.tensor(folded, dtype=torch.int64, device=state_L.device)))
    bits_L = _shifted(_mixed(state_L), 11) & MASK_53
    return (bits_L.double() + 0.5) / float(1 << 53)


def logistic_noise(position_L: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """The difference of two Gumbel variables for each position, [L] float64."""
    u_L = uniform_at(position_L, seeds)
    return torch.log(u_L) - torch.log1p(-u_L)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = x + GOLDEN_GAMMA
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right with zeros from the left, which torch does not do to signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
