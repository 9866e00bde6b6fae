"""Diagonal plus low rank (S4): A = Lambda - P P^*, one of each conjugate pair kept; its kernel in O((N + log L) L)."""

import torch

__all__ = ["dplr_kernel", "real_form"]


def real_form(
    lambda_DN: torch.Tensor, p_DN: torch.Tensor, b_DN: torch.Tensor, c_DN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same system over real and imaginary parts: A [D, 2 N, 2 N], b [D, 2 N], C [D, 1, 2 N].

    A state x stands for x and its conjugate, so P^* of both is 2 Re(P^* x), and the output 2 Re(C x).

    Shapes: lambda, p, b, c [D, N] complex.
    """
    real, imaginary = torch.diag_embed(lambda_DN.real), torch.diag_embed(lambda_DN.imag)
    rotation = torch.cat([torch.cat([real, -imaginary], dim=2), torch.cat([imaginary, real], dim=2)], dim=1)
    p_DM = torch.cat([p_DN.real, p_DN.imag], dim=1)
    b_DM = torch.cat([b_DN.real, b_DN.imag], dim=1)
    c_DM = 2 * torch.cat([c_DN.real, -c_DN.imag], dim=1)
    return rotation - 2 * p_DM[:, :, None] * p_DM[:, None], b_DM, c_DM[:, None]


def dplr_kernel(
    lambda_DN: torch.Tensor,
    p_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    dt_D: torch.Tensor,
    left_over_DNN: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """The taps C A^l b of the trapezoidal system for l < `length`, from its generating function at the roots of unity.

    The generating function is that of infinitely many taps; those after `length` are taken out beforehand by
    `left_over`, the real form's I - A^length. By Woodbury's identity a low-rank term costs two more sums per root.

    Shapes: lambda, p, b, c [D, N] complex, dt [D], left_over [D, 2 N, 2 N] real -> [length, D] real.
    Cost: 16 D N L operations and a transform of length L per channel.
    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2021 (S4), Algorithm 1.
    """
    if not length:
        return lambda_DN.real.new_zeros((0, lambda_DN.shape[0]))
    pairs = c_DN.shape[1]
    c_DM = torch.cat([c_DN.real, -c_DN.imag], dim=1)
    with torch.autocast(dt_D.device.type, enabled=False):
        c_DM = (c_DM[:, None] @ left_over_DNN)[:, 0]
    c_DN = torch.complex(c_DM[:, :pairs], -c_DM[:, pairs:])
    angle_F = 2 * torch.pi / length * torch.arange(length // 2 + 1, device=dt_D.device, dtype=dt_D.dtype)
    root_F = torch.polar(torch.ones_like(angle_F), -angle_F)
    # R of the reference times 1 + root has no pole at root = -1.
    gap_DF = 2 * (1 - root_F) / dt_D[:, None]

    def both(x_DN: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_DN, x_DN.conj()], dim=1)

    resolvent_DMF = 1 / (gap_DF[:, None] - (1 + root_F) * both(lambda_DN)[..., None])
    sums = {
        name: torch.einsum("dm,dmf->df", both(left) * both(right), resolvent_DMF)
        for name, left, right in (
            ("cb", c_DN, b_DN),
            ("cp", c_DN, p_DN),
            ("pb", p_DN.conj(), b_DN),
            ("pp", p_DN.conj(), p_DN),
        )
    }
    low_rank_DF = (1 + root_F) * sums["cp"] * sums["pb"] / (1 + (1 + root_F) * sums["pp"])
    taps_DT: torch.Tensor = torch.fft.irfft(2 * (sums["cb"] - low_rank_DF), n=length)
    return taps_DT.T
