"""The kernel of a diagonal state space, as long as the sequence, without the matrix of all powers.

With l = C i + j a power a^l is a^(C i) a^j, so the kernel is one product of two small matrices of powers per channel:
about 2 sqrt(L) numbers for each eigenvalue in place of L.
"""

import math

import torch

from dist_attn.ops.diagonal import power, powers

__all__ = ["diagonal_kernel"]


def diagonal_kernel(a_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor, length: int) -> torch.Tensor:
    """K_l = 2 Re sum_n c a^l b for 0 <= l < `length`: what a unit input leaves l steps later.

    Shapes: a, b, c [D, N] complex -> [length, D] real.
    Cost: 8 D N L operations, memory for O(D (N sqrt(L) + L)) numbers.
    Reference: A Unified View of Long-Sequence Models, Sec. 7 (S4D, Vandermonde kernel).
    """
    columns = max(1, math.isqrt(max(length - 1, 0)) + 1)
    rows = -(-length // columns)
    near_DNC = powers(a_DN, columns)
    far_DNR = powers(power(a_DN, columns), max(rows, 1))[..., :rows]
    far_DRN = ((b_DN * c_DN)[..., None] * far_DNR).transpose(1, 2)
    # The real part of a complex product as one real one: [Re, -Im] . [Re; Im].
    left_DRM = torch.cat([far_DRN.real, -far_DRN.imag], dim=2)
    right_DMC = torch.cat([near_DNC.real, near_DNC.imag], dim=1)
    # Under autocast the taps would be half-precision numbers, 3e-3 beside themselves.
    with torch.autocast(a_DN.device.type, enabled=False):
        taps_DT = 2 * (left_DRM @ right_DMC).flatten(1)
    return taps_DT[:, :length].T
