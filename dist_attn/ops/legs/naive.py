"""The oracle of the LegS memory: its bilinear step as printed, and its polynomials written out."""

from math import comb

import torch

from dist_attn.ops.legs.state import LegsState

__all__ = ["legs_memory_naive", "reconstruct_naive"]


def legs_memory_naive(
    f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
) -> tuple[torch.Tensor, LegsState]:
    """(I - A / 2t) c_t = (I + A / 2t) c_{t-1} + (B / t) f_t and y_t = read . c_t, token by token; see `legs_memory`."""
    batch, length, channels = f_BLD.shape
    size = read_DN.shape[1]
    before = LegsState.empty(batch, channels, size) if state is None else state
    n = torch.arange(size, dtype=torch.float64)
    b_N = (2 * n + 1).sqrt()
    a_NN = -(b_N[:, None] * b_N).tril(-1) - torch.diag(n + 1)
    one_NN = torch.eye(size, dtype=torch.float64)
    c_BDN, outputs = before.c_BDN, []
    for step in range(length):
        t_B11 = (before.seen_B + step + 1).double()[:, None, None]
        right_BDN = c_BDN @ (one_NN + a_NN / (2 * t_B11)).mT + b_N / t_B11 * f_BLD[:, step, :, None]
        c_BDN = torch.linalg.solve(one_NN - a_NN / (2 * t_B11), right_BDN.mT).mT
        outputs.append((c_BDN * read_DN).sum(2))
    y_BLD = torch.stack(outputs, dim=1) if outputs else f_BLD.new_zeros((batch, 0, channels))
    return y_BLD.to(f_BLD.dtype), LegsState(c_BDN, before.seen_B + length)


def reconstruct_naive(c: torch.Tensor, points_P: torch.Tensor) -> torch.Tensor:
    """sum_n c_n sqrt(2n + 1) P_n(2x - 1), each polynomial by its powers of x; see `reconstruct`. For N up to 8."""
    signal = c.new_zeros((*c.shape[:-1], len(points_P)))
    for n in range(c.shape[-1]):
        powers = [(-1) ** (n + k) * comb(n, k) * comb(n + k, k) * points_P**k for k in range(n + 1)]
        signal = signal + c[..., n, None] * (2 * n + 1) ** 0.5 * torch.stack(powers).sum(0)
    return signal
