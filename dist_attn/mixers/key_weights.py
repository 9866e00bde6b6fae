"""Weights of keys that are given by logarithms, as gates and key scales that never overflow.

Those of the Gaussian kernel without unit norms are exp(|sigma k|^2 / 2), those of positive features exp(max w k -
|k|^2 / 2).
"""

from typing import NamedTuple

import torch

from dist_attn.ops import SequenceOps
from dist_attn.ops.running_maximum import rise_from

PROJECTED_TOKENS = 512  # by random vectors at a time


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
    with torch.autocast(k.device.type, enabled=False):
        dtype = torch.promote_types(k.dtype, torch.float32)
        return 0.5 * (sigma.to(dtype) * k.to(dtype)).square().sum(dim=-1)


def log_positive_weights(k: torch.Tensor, w_HDK: torch.Tensor, scale: float) -> torch.Tensor:
    """max_d w_d k - |scale k|^2 / 2 of each key, in float32 or wider; k is [B, H, S, K], or [B, H, K] for one token.

    `w` has the scale in it already. The maximum is a constant here, as in `feature_maps.positive_ratios`, which divides
    by it.

    Reference: Choromanski et al. 2021, Rethinking Attention with Performers, Lemma 1, with the stabiliser for keys.
    """
    if k.dim() == 3:
        return log_positive_weights(k[:, :, None], w_HDK, scale).squeeze(2)
    with torch.autocast(k.device.type, enabled=False):
        keys = k.to(torch.promote_types(k.dtype, torch.float32))
        with torch.no_grad():
            w_HKD = w_HDK.to(keys.dtype).transpose(1, 2)
            largest = [(part @ w_HKD).amax(dim=-1) for part in keys.split(PROJECTED_TOKENS, dim=2)]
        return torch.cat(largest, dim=2) - 0.5 * (scale * keys).square().sum(dim=-1)


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
    return _in_units(log_weight_BHS, level_BHS, rise_BHS, after_BH, log_gate_BHS, key_scale_BHS)


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
    return _in_units(log_weight_BH, level_BH, rise_from(unit_BH, level_BH), level_BH, log_gate_BH, key_scale_BH)


def _in_units(
    log_weight: torch.Tensor,
    level: torch.Tensor,
    rise: torch.Tensor,
    after_BH: torch.Tensor,
    log_gate: torch.Tensor | None,
    key_scale: torch.Tensor | None,
) -> KeyWeights:
    # In float64 until the differences are taken: far from 0 levels have no digits left in float32.
    dtype = log_weight.dtype
    scale = (log_weight.double() - level).exp().to(dtype)
    scale = scale if key_scale is None else scale * key_scale
    gate = -rise if log_gate is None else log_gate.double() - rise
    return KeyWeights(gate.to(dtype), scale, after_BH)
