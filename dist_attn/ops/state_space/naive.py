"""The oracle of a diagonal state space's kernel: every tap by itself."""

import torch

__all__ = ["diagonal_kernel_naive"]


def diagonal_kernel_naive(a_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor, length: int) -> torch.Tensor:
    """K_l = 2 Re sum_n c a^l b, [length, D], tap by tap; see `diagonal_kernel`."""
    taps, powers_DN = [], torch.ones_like(a_DN)
    for _ in range(length):
        taps.append(2 * (c_DN * b_DN * powers_DN).sum(1).real)
        powers_DN = powers_DN * a_DN
    return torch.stack(taps) if taps else a_DN.real.new_zeros((0, a_DN.shape[0]))
