"""The oracle of the recurrence with a full matrix: one token after the other."""

import torch

__all__ = ["dense_scan_naive"]


def dense_scan_naive(
    u_BLD: torch.Tensor,
    a_DNN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DMN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t = A x_{t-1} + b u_t, y_t = C x_t, step by step; see `dense_scan`."""
    batch, length, channels = u_BLD.shape
    x_BDN = a_DNN.new_zeros((batch, channels, a_DNN.shape[1])) if state is None else state
    outputs = []
    for t in range(length):
        x_BDN = (a_DNN @ x_BDN[..., None])[..., 0] + b_DN * u_BLD[:, t, :, None]
        outputs.append((c_DMN @ x_BDN[..., None])[..., 0])
    y_BLDM = torch.stack(outputs, dim=1) if outputs else u_BLD.new_zeros((batch, 0, *c_DMN.shape[:2]))
    return y_BLDM.to(u_BLD.dtype), x_BDN
