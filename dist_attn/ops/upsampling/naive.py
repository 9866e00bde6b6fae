"""The oracle of up-sampling: every position looks at all kept tokens."""

import torch

__all__ = ["upsample_naive"]


def upsample_naive(
    z_ND: torch.Tensor, position_N: torch.Tensor, wanted_T: torch.Tensor, *, neighbours: int | None = None
) -> torch.Tensor:
    """See `upsample`; O(T N)."""
    kept = position_N.tolist()
    rows = []
    for t in wanted_T.tolist():
        if t in kept:
            rows.append(z_ND[kept.index(t)])
        elif neighbours is None:
            left = max((n for n, p in enumerate(kept) if p < t), default=None)
            right = min((n for n, p in enumerate(kept) if p > t), default=None)
            if left is None or right is None:
                rows.append(z_ND[-1 if right is None else 0])
            else:
                share = (t - kept[left]) / (kept[right] - kept[left])
                rows.append((1 - share) * z_ND[left] + share * z_ND[right])
        else:
            nearest = sorted(range(len(kept)), key=lambda n: (abs(kept[n] - t), kept[n]))[:neighbours]
            weights = [1.0 / (kept[n] - t) ** 2 for n in nearest]
            rows.append(sum(w * z_ND[n] for w, n in zip(weights, nearest, strict=True)) / sum(weights))
    return torch.stack(rows) if rows else z_ND.new_zeros((0, z_ND.shape[1]))
