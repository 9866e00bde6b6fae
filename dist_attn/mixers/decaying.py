"""Recurrences whose states decay and take nothing back: gated linear attention, Lightning attention, Mamba-2."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import ShortConvolution, linear_float32
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.recurrent import (
    GatedNorm,
    LowRankGate,
    Recurrence,
    RecurrentMixer,
    first_log_rates,
    first_step_biases,
    split_heads_last,
)
from dist_attn.model_config.mixers.recurrent import GlaConfig, LightningConfig, Mamba2Config


@final
class GatedLinearAttention(RecurrentMixer):
    """S_t = diag(sigmoid(gate(x_t))^(1/16)) S_{t-1} + k_t v_t^T, out(norm(q_t^T S_t / sqrt(K)) * silu(z_t)).

    Reference: Yang et al. 2023, Gated Linear Attention Transformers, Sec. 4.4.
    """

    config: GlaConfig

    def __init__(self, config: GlaConfig) -> None:
        super().__init__(config)
        size, keys, values = config.hidden_size, config.keys_size, config.values_size
        self.inputs = Linear(size, 2 * keys + 2 * values, bias=False)
        self.decay = LowRankGate(size, config.gate_rank, keys, bias=torch.zeros(keys))
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, F.silu)

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        keys, values = config.keys_size, config.values_size
        *qkv, gate = rest.split((keys, keys, values, values), dim=-1)
        decay = F.logsigmoid(self.decay(x)) / config.gate_divisor
        q, k, v, log_decay = (split_heads_last(t, config.num_heads) for t in (*qkv, decay))
        return Recurrence(q * config.key_size**-0.5, k, v, log_decay, gate)


def slopes(config: LightningConfig, device: torch.device) -> torch.Tensor:
    """The slope of each head, the negative of its log decay, [H] in float64."""
    heads_H = torch.arange(1, config.num_heads + 1, dtype=torch.float64, device=device)
    if config.slopes == "retention":
        return -config.slope_scale * torch.log1p(-torch.exp2(-4 - heads_H))
    return config.slope_scale * torch.exp2(-8 * heads_H / config.num_heads)


@final
class LightningAttention(RecurrentMixer):
    """S_t = exp(-slope) S_{t-1} + k_t v_t^T, out(norm(q_t^T S_t) * sigmoid(z_t)), with q, k, v past silu.

    Reference: Qin et al. 2024, Lightning Attention-2, Eq. 3; MiniMax-01, 2025, Sec. 2.2. Slopes "retention": Sun et al.
    2023, Retentive Network, Eq. 8.
    """

    config: LightningConfig

    def __init__(self, config: LightningConfig) -> None:
        super().__init__(config)
        keys, values = config.keys_size, config.values_size
        self.inputs = Linear(config.hidden_size, 2 * keys + 2 * values, bias=False)
        group = values if config.norm == "whole" else config.value_size
        self.norm = GatedNorm(values, group, config.norm_eps, torch.sigmoid)

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        keys, values = config.keys_size, config.values_size
        *qkv, gate = rest.split((keys, keys, values, values), dim=-1)
        q, k, v = (split_heads_last(F.silu(t), config.num_heads) for t in qkv)
        dtype = torch.promote_types(x.dtype, torch.float32)
        log_decay = -slopes(config, x.device).to(dtype)[:, None].expand(*q.shape[:-1], 1)
        return Recurrence(q, k, v, log_decay, gate)


@final
class Mamba2(RecurrentMixer):
    """S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T, out(norm((C_t^T S_t + D x_t) * silu(z_t))).

    Reference: Dao and Gu 2024, Transformers are SSMs, Sec. 7 and Fig. 6.
    """

    config: Mamba2Config

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config)
        heads, values = config.num_heads, config.values_size
        self.inputs = Linear(config.hidden_size, config.convolved_size + values, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.convolution_bias_C = nn.Parameter(torch.zeros(config.convolved_size)) if config.convolution_bias else None
        self.gate = nn.Linear(config.hidden_size, heads)
        with torch.no_grad():
            self.gate.bias.copy_(first_step_biases(heads))
        self.log_rate_H = nn.Parameter(first_log_rates(heads))
        self.skip_H = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(values, values // config.groups, config.norm_eps, F.silu, gate_first=True)

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        shared = config.groups * config.key_size
        if self.convolution_bias_C is not None:
            convolved = convolved + self.convolution_bias_C
        values, b, c = F.silu(convolved).split((config.values_size, shared, shared), dim=-1)
        values = split_heads_last(values, config.num_heads)
        each = config.num_heads // config.groups
        k, q = (split_heads_last(t, config.groups).repeat_interleave(each, dim=-2) for t in (b, c))
        step = F.softplus(linear_float32(self.gate, x))[..., None]
        log_decay = -self.log_rate_H.exp()[:, None] * step
        return Recurrence(q, k, values * step, log_decay, rest, skip=values * self.skip_H[:, None])
