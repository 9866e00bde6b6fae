"""The learned vectors of Shaw's relative positions, as the parameters of a mixer with exact softmax attention."""

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.head_config import RelativeConfig
from dist_attn.ops import RelativePositions

__all__ = ["RelativeRows"]


class RelativeRows(nn.Module):
    """A row per distance for keys and, if asked for, for values; of each head or shared by all.

    Under a mask rows are for keys 0 to `reach` tokens back, the furthest first; those of later keys are never seen.

    Reference: Shaw et al. 2018, Self-Attention with Relative Position Representations, Sec. 3.
    """

    def __init__(self, config: RelativeConfig, num_heads: int, size: int, values: int, *, causal: bool) -> None:
        super().__init__()
        self.unseen = config.reach if causal else 0
        heads, rows = 1 if config.shared else num_heads, 2 * config.reach + 1 - self.unseen
        self.keys_HRK = nn.Parameter(0.02 * torch.randn(heads, rows, size))
        self.values_HRV = nn.Parameter(0.02 * torch.randn(heads, rows, values)) if config.values else None

    def forward(self) -> RelativePositions:
        """The rows as attention takes them, zeros for keys that a mask hides."""
        keys_HRK = F.pad(self.keys_HRK, (0, 0, 0, self.unseen))
        return RelativePositions(
            keys_HRK, None if self.values_HRV is None else F.pad(self.values_HRV, (0, 0, 0, self.unseen))
        )
