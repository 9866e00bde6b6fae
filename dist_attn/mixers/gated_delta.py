"""Gated DeltaNet: each token decays the state of a head and writes over what its key reads there."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import ShortConvolution, linear_float32
from dist_attn.mixers.recurrent import (
    KEY_EPS,
    GatedNorm,
    Recurrence,
    RecurrentMixer,
    first_log_rates,
    first_step_biases,
    split_heads_last,
    unit_norm,
)
from dist_attn.model_config.mixers.delta_rules import GatedDeltaConfig


@final
class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule over unit queries and keys; beta = sigmoid(b_t), log decay -A softplus(a_t + bias).

    Reference: Yang et al. 2024, Gated Delta Networks, Eq. 10 and Fig. 1; twice beta (`allow_negative`): Grazzi et al.
    2024, Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues.
    """

    config: GatedDeltaConfig

    def __init__(self, config: GatedDeltaConfig) -> None:
        super().__init__(config)
        size, heads = config.hidden_size, config.num_heads
        self.inputs = nn.Linear(size, config.convolved_size + config.values_size, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.gate = nn.Linear(size, 2 * heads, bias=False)  # beta's, then the steps'
        self.step_bias_H = nn.Parameter(first_step_biases(heads))
        self.log_rate_H = nn.Parameter(first_log_rates(heads))
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, F.silu)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        convolved, gate = self.inputs(x).split((self.config.convolved_size, self.config.values_size), dim=-1)
        return convolved, gate

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        groups = config.num_key_heads
        keys, each = groups * config.key_size, config.num_heads // groups
        q, k, v = F.silu(convolved).split((keys, keys, config.values_size), dim=-1)
        q, k = (unit_norm(split_heads_last(t, groups), KEY_EPS).repeat_interleave(each, dim=-2) for t in (q, k))
        written, step = linear_float32(self.gate, x).chunk(2, dim=-1)
        log_decay = -self.log_rate_H.exp() * F.softplus(step + self.step_bias_H)
        return Recurrence(
            q * config.key_size**-0.5,
            k,
            split_heads_last(v, config.num_heads),
            log_decay[..., None],
            rest,
            beta=torch.sigmoid(written) * (2 if config.allow_negative else 1),
        )

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        y: torch.Tensor = self.norm(out, of.gate)
        return y
