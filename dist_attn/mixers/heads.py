"""What attention mixers share: a short convolution, heads, rotary and relative positions."""

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import state_zeros
from dist_attn.model_config.mixers.heads import RelativeConfig, RotaryConfig
from dist_attn.ops import RelativePositions, SequenceOps


class ShortConvolution(nn.Module):
    """A causal depthwise convolution that starts as the identity; it tells each token what stands just before it."""

    def __init__(self, hidden_size: int, taps: int) -> None:
        super().__init__()
        weight = torch.zeros(taps, hidden_size)
        weight[0] = 1.0
        self.weight_KD = nn.Parameter(weight)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, tail_BKD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolved tokens and the last K - 1 tokens of x."""
        return ops.convolve_streaming(x_BLD, self.weight_KD, tail_BKD)

    def step(self, x_BD: torch.Tensor, tail_BKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` for one token."""
        window_BKD = torch.cat([tail_BKD, x_BD[:, None]], dim=1)
        return (window_BKD * self.weight_KD.flip(0)).sum(dim=1), window_BKD[:, 1:]

    def initial_tail(self, batch: int) -> torch.Tensor:
        """No tokens yet: zeros."""
        taps, hidden_size = self.weight_KD.shape
        return state_zeros(self.weight_KD, (batch, taps - 1, hidden_size))


def split_heads(x_BLD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, L, H K] -> [B, H, L, K]."""
    x_BLHK: torch.Tensor = x_BLD.unflatten(-1, (num_heads, -1))
    return x_BLHK.transpose(1, 2)


def merge_heads(x_BHLK: torch.Tensor) -> torch.Tensor:
    """[B, H, L, K] -> [B, L, H K]."""
    return x_BHLK.transpose(1, 2).flatten(2)


def linear_float32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)` outside any autocast: a gate near 1 loses its digits in bf16 (1 - bf16(g) is 58 % off at logit 6)."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(layer.weight.dtype), layer.weight, layer.bias)


def rotate(x_BHLK: torch.Tensor, positions_BL: torch.Tensor, rotary: RotaryConfig | None) -> torch.Tensor:
    """Turn the pairs (i, i + size / 2) of each head by position * base^(-2i / size); None: nothing turns.

    Shapes: x [B, H, L, K], positions [B, L] or [1, L] (integers) -> [B, H, L, K] in the type of x. Angles are computed
        in float64 so that position 1,000,000 keeps its digits.
    Reference: Su et al. 2021 (RoFormer), Eq. 15, with the two halves of a head in the place of neighbours.
    """
    if rotary is None:
        return x_BHLK
    half = rotary.size // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x_BHLK.device) / half
    angles_BLN = positions_BL.to(x_BHLK.device, torch.float64)[..., None] * rotary.base**-exponents
    dtype = torch.promote_types(x_BHLK.dtype, torch.float32)
    cos_B1LN, sin_B1LN = (t.to(dtype)[:, None] for t in (angles_BLN.cos(), angles_BLN.sin()))
    first, second, rest = x_BHLK.split([half, half, x_BHLK.shape[-1] - rotary.size], dim=-1)
    turned = (first * cos_B1LN - second * sin_B1LN, second * cos_B1LN + first * sin_B1LN)
    return torch.cat([t.to(x_BHLK.dtype) for t in turned] + [rest], dim=-1)


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
