"""The parts that attention mixers share: short convolution, heads, rotary and relative positions, weights of keys.

Weights of keys are given by logarithms, as gates and key scales that never overflow. Those of the Gaussian kernel
without unit norms are exp(|sigma k|^2 / 2), those of positive features exp(max w k - |k|^2 / 2).

Letters: B batch, H heads, L queries and S keys on this rank, K head size, D model width, R distances, V values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import Paradigm, TokenMixer, state_zeros
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.heads import HeadsConfig, RelativeConfig, RotaryConfig
from dist_attn.ops import RelativePositions, SequenceOps
from dist_attn.ops.device import without_autocast
from dist_attn.ops.running_maximum import rise_from


class ShortConvolution(nn.Module):
    """A causal depthwise convolution that starts as the identity; it tells each token what stands just before it."""

    def __init__(self, hidden_size: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        weight = torch.zeros(taps, hidden_size)
        weight[0] = 1.0
        self.weight_KD = nn.Parameter(weight)
        self.bias_D = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, tail_BKD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolved tokens and the last K - 1 tokens of x."""
        y_BLD, after_BKD = ops.convolve_streaming(x_BLD, self.weight_KD, tail_BKD)
        return self._shifted(y_BLD), after_BKD

    def step(self, x_BD: torch.Tensor, tail_BKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` for one token."""
        window_BKD = torch.cat([tail_BKD, x_BD[:, None]], dim=1)
        return self._shifted((window_BKD * self.weight_KD.flip(0)).sum(dim=1)), window_BKD[:, 1:]

    def initial_tail(self, batch: int) -> torch.Tensor:
        """The tail before any token: zeros."""
        taps, hidden_size = self.weight_KD.shape
        return state_zeros(self.weight_KD, (batch, taps - 1, hidden_size))

    def _shifted(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias_D is None else y + self.bias_D


def split_heads(x_BLD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, L, H K] -> [B, H, L, K]."""
    x_BLHK: torch.Tensor = x_BLD.unflatten(-1, (num_heads, -1))
    return x_BLHK.transpose(1, 2)


def merge_heads(x_BHLK: torch.Tensor) -> torch.Tensor:
    """[B, H, L, K] -> [B, L, H K]."""
    return x_BHLK.transpose(1, 2).flatten(2)


def linear_float32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)` outside any autocast: a gate near 1 loses its digits in bf16 (1 - bf16(g) is 58 % off at logit 6)."""
    with without_autocast(x.device):
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


class HeadInputs(NamedTuple):
    """The inputs of one call of attention over heads: [B, H, L, ·], or [B, H, ·] of one token.

    Gates and key scales, [B, H, L] or [B, H], are there where the mixer has any.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_gate: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None


class ProjectedAttention(TokenMixer):
    """A base of causal attention: a short convolution perhaps, one map to queries, keys and values, and one back."""

    config: HeadsConfig
    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.convolution = ShortConvolution(size, config.short_convolution) if config.short_convolution else None
        self.qkv = Linear(size, sum(config.qkv_sizes), bias=config.projection_bias)
        self.out = Linear(config.qkv_sizes[2], size, bias=config.projection_bias)

    def convolved(
        self, x_BLD: torch.Tensor, ops: SequenceOps, tail_BKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens after the short convolution, where there is one, and the last ones that it still needs."""
        return (x_BLD, tail_BKD) if self.convolution is None else self.convolution(x_BLD, ops, tail_BKD)

    def convolved_step(self, x_BD: torch.Tensor, tail_BKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`convolved` for one token."""
        return (x_BD, tail_BKD) if self.convolution is None else self.convolution.step(x_BD, tail_BKD)

    def heads(self, x_BLD: torch.Tensor) -> HeadInputs:
        """Queries, keys and values of all heads."""
        parts = self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1)
        return HeadInputs(*(split_heads(part, self.config.num_heads) for part in parts))

    def initial_tail(self, batch: int) -> torch.Tensor:
        """The tail before any token."""
        if self.convolution is None:
            return state_zeros(empty_output(self.qkv), (batch, 0, self.config.hidden_size))
        return self.convolution.initial_tail(batch)


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


class KeyWeights(NamedTuple):
    """Gates and key scales for linear attention, and the log of the unit in which its state is then held, [B, H]."""

    log_gate: torch.Tensor
    key_scale: torch.Tensor
    unit_BH: torch.Tensor


def log_key_weights(k: torch.Tensor, sigma_H1K: torch.Tensor) -> torch.Tensor:
    """|sigma k|^2 / 2 of each key, in float32 or wider; k is [B, H, S, K], or [B, H, K] for one token.

    Reference: Random Feature Attention, Eq. 4 and 12, with the learned sigma of Eq. 8 in the place of 1 / s.
    """
    sigma = sigma_H1K if k.dim() == 4 else sigma_H1K[:, 0]
    with without_autocast(k.device):
        dtype = torch.promote_types(k.dtype, torch.float32)
        return 0.5 * (sigma.to(dtype) * k.to(dtype)).square().sum(dim=-1)


def stable_key_weights(
    log_weight_BHS: torch.Tensor,
    ops: SequenceOps,
    unit_BH: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
) -> KeyWeights:
    """key_scale exp(log_weight) with gates, relative to the largest weight so far as the gates have left it.

    The state is held in units of exp(m_t), m_t = max(m_{t-1} + log g_t, log_weight_t), so a change of unit is a gate:
    S_t / e^{m_t} = g_t e^{m_{t-1} - m_t} S_{t-1} / e^{m_{t-1}} + e^{log_weight_t - m_t} phi(k_t) v_t^T. The unit
    cancels in outputs, which is exact for the denominators `floor` and `exact`; nothing looks at a later key.

    `unit_BH` is that of the state before the first global token. Of the empty one it is `NO_TOKENS`, or 0 where no log
    weight is below 0.
    Cost: across ranks one exchange of 16 B H bytes.
    """
    level_BHS, rise_BHS, after_BH = ops.running_maximum(log_weight_BHS, unit_BH, log_gate_BHS=log_gate_BHS)
    return in_units(log_weight_BHS, level_BHS, rise_BHS, after_BH, log_gate_BHS, key_scale_BHS)


def step_key_weights(
    log_weight_BH: torch.Tensor,
    unit_BH: torch.Tensor,
    *,
    log_gate_BH: torch.Tensor | None = None,
    key_scale_BH: torch.Tensor | None = None,
) -> KeyWeights:
    """`stable_key_weights` for one token."""
    faded_BH = unit_BH if log_gate_BH is None else unit_BH + log_gate_BH.detach().double()
    level_BH = torch.maximum(faded_BH, log_weight_BH.detach().double())
    return in_units(log_weight_BH, level_BH, rise_from(unit_BH, level_BH), level_BH, log_gate_BH, key_scale_BH)


def in_units(
    log_weight: torch.Tensor,
    level: torch.Tensor,
    rise: torch.Tensor,
    after_BH: torch.Tensor,
    log_gate: torch.Tensor | None,
    key_scale: torch.Tensor | None,
) -> KeyWeights:
    """Gates and key scales in the units of the running maxima `level` that rise by `rise`; see `stable_key_weights`."""
    # In float64 until the differences are taken: far from 0 levels have no digits left in float32.
    dtype = log_weight.dtype
    scale = (log_weight.double() - level).exp().to(dtype)
    scale = scale if key_scale is None else scale * key_scale
    gate = -rise if log_gate is None else log_gate.double() - rise
    return KeyWeights(gate.to(dtype), scale, after_BH)
