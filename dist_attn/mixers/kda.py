"""Kimi delta attention: the gated delta rule with a decay for each number of a key."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import ShortConvolution, linear_float32
from dist_attn.mixers.recurrent import (
    KEY_EPS,
    GatedNorm,
    LowRankGate,
    Recurrence,
    RecurrentMixer,
    first_log_rates,
    first_step_biases,
    split_heads_last,
    unit_norm,
)
from dist_attn.model_config.mixers.delta_rules import KimiDeltaConfig


@final
class KimiDeltaAttention(RecurrentMixer):
    """The gated delta rule over unit queries and keys; log decays -A softplus(up(down(x_t)) + bias), one per channel.

    Reference: Kimi Linear, 2025, Eq. 1 and Sec. 4.
    """

    config: KimiDeltaConfig

    def __init__(self, config: KimiDeltaConfig) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.rank
        self.inputs = nn.Linear(size, config.convolved_size, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.gate = nn.Linear(size, config.num_heads, bias=False)  # beta's
        self.steps = LowRankGate(size, rank, config.keys_size, bias=first_step_biases(config.keys_size))
        self.log_rate_H = nn.Parameter(first_log_rates(config.num_heads))
        self.out_gate = LowRankGate(size, rank, config.values_size, bias=None)
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, torch.sigmoid)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = self.inputs(x)
        return projected, projected[..., :0]

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        heads, keys = config.num_heads, config.keys_size
        parts = F.silu(convolved).split((keys, keys, config.values_size), dim=-1)
        q, k, v = (split_heads_last(t, heads) for t in parts)
        log_decay = -self.log_rate_H.exp()[:, None] * F.softplus(split_heads_last(self.steps(x), heads))
        return Recurrence(
            unit_norm(q, KEY_EPS) * config.key_size**-0.5,
            unit_norm(k, KEY_EPS),
            v,
            log_decay,
            self.out_gate(x),
            beta=torch.sigmoid(linear_float32(self.gate, x)) * (2 if config.allow_negative else 1),
        )

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        y: torch.Tensor = self.norm(out, of.gate)
        return y
