"""The oracle of the running maximum: one token after the other."""

import torch

__all__ = ["running_maximum_naive"]


def running_maximum_naive(
    x_BHS: torch.Tensor,
    before_BH: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None = None,
    documents: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m_t = max(m_{t-1} + log_gate_t, x_t) by its definition; see `running_maximum`."""
    level_BH = before_BH.detach().double()
    levels, rises = [], []
    for t in range(x_BHS.shape[2]):
        x_BH = x_BHS[:, :, t].detach().double()
        gate_BH = torch.zeros_like(x_BH) if log_gate_BHS is None else log_gate_BHS[:, :, t].detach().double()
        earlier_BH = level_BH
        level_BH = x_BH if t in documents else torch.maximum(level_BH + gate_BH, x_BH)
        levels.append(level_BH)
        first_BH = (earlier_BH < -5e29) | (t in documents)  # nothing before it
        rises.append(torch.where(first_BH, torch.zeros_like(level_BH), level_BH - earlier_BH))
    empty = before_BH.new_empty((*before_BH.shape, 0), dtype=torch.float64)
    return (
        torch.stack(levels, dim=2) if levels else empty,
        torch.stack(rises, dim=2) if rises else empty,
        level_BH,
    )
