"""The oracle of selection: tokens are looked at one after the other, best score first."""

import torch

__all__ = ["select_tokens_naive"]


def select_tokens_naive(
    x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select_tokens`; plain comparisons, O(L log L)."""
    scores = score_L.tolist()
    best_first = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    limit = torch.tensor(threshold, dtype=score_L.dtype).item()
    passing = [token for token in best_first if scores[token] >= limit] or best_first[:1]
    kept = sorted(passing if at_most is None else passing[:at_most])
    position_N = torch.tensor(kept, dtype=torch.int64, device=x_LC.device)
    return x_LC[position_N], position_N
