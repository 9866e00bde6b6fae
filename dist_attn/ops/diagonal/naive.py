"""The oracle of the diagonal recurrence: one token after the other."""

import torch

__all__ = ["diagonal_scan_naive"]


def diagonal_scan_naive(
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t = a x_{t-1} + b u_t, y_t = 2 Re(sum_n c x_t), step by step; see `diagonal_scan`."""
    batch, length, channels = u_BLD.shape
    kind = torch.promote_types(torch.promote_types(u_BLD.dtype, torch.complex64), a_DN.dtype)
    x_BDN = torch.zeros((batch, channels, a_DN.shape[1]), dtype=kind) if state is None else state.to(kind)
    outputs = []
    for t in range(length):
        x_BDN = a_DN * x_BDN + b_DN * u_BLD[:, t, :, None]
        outputs.append(2 * (c_DN * x_BDN).sum(-1).real)
    y_BLD = torch.stack(outputs, dim=1) if outputs else u_BLD.new_zeros(u_BLD.shape)
    return y_BLD.to(u_BLD.dtype), x_BDN
