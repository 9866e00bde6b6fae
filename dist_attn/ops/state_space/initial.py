"""Where a diagonal state space begins: its eigenvalues, one of each conjugate pair, and what inputs weigh in them."""

import math
from typing import Literal

import torch

from dist_attn.ops.state_space.hippo import legs_eigenvalues

__all__ = ["Spectrum", "initial_eigenvalues", "initial_inputs"]

Spectrum = Literal["lin", "inv", "real", "legs"]


def initial_eigenvalues(spectrum: Spectrum, pairs: int) -> torch.Tensor:
    """A_n for n < `pairs`, complex128 [N]: -1/2 + i pi n, its inverse law, -(n + 1), or those of HiPPO-LegS.

    Reference: S4D (Gu et al. 2022), Sec. 4; with N the size of the whole state, 2 `pairs`.
    """
    n, size = torch.arange(pairs, dtype=torch.float64), 2 * pairs
    half = torch.full_like(n, -0.5)
    match spectrum:
        case "lin":
            return torch.complex(half, math.pi * n)
        case "inv":
            return torch.complex(half, size / math.pi * (size / (2 * n + 1) - 1))
        case "real":
            return torch.complex(-(n + 1), torch.zeros_like(n))
        case "legs":
            return legs_eigenvalues(size)[0]


def initial_inputs(spectrum: Spectrum, pairs: int) -> torch.Tensor:
    """B_n for n < `pairs`, float64 [N]: 1, or for `legs` |V^* B|, HiPPO's B in the eigenvectors V of A + P P^T.

    An eigenvector may be turned by any phase, which C takes up: of B only the sizes say something.

    Reference: as `initial_eigenvalues`.
    """
    if spectrum == "legs":
        return legs_eigenvalues(2 * pairs)[1].abs()
    return torch.ones(pairs, dtype=torch.float64)
