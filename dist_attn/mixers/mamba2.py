"""Mamba-2: a state space whose steps, inputs and outputs depend on the token, as a recurrence of matrices."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import ShortConvolution, linear_float32
from dist_attn.mixers.recurrent import (
    GatedNorm,
    Recurrence,
    RecurrentMixer,
    first_log_rates,
    first_step_biases,
    split_heads_last,
)
from dist_attn.model_config.mixers.recurrent import Mamba2Config


@final
class Mamba2(RecurrentMixer):
    """S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T, out(norm((C_t^T S_t + D x_t) * silu(z_t))).

    Reference: Dao and Gu 2024, Transformers are SSMs, Sec. 7 and Fig. 6.
    """

    config: Mamba2Config

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config)
        heads, values = config.num_heads, config.values_size
        self.inputs = nn.Linear(config.hidden_size, config.convolved_size + values, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.convolution_bias_C = nn.Parameter(torch.zeros(config.convolved_size)) if config.convolution_bias else None
        self.gate = nn.Linear(config.hidden_size, heads)
        with torch.no_grad():
            self.gate.bias.copy_(first_step_biases(heads))
        self.log_rate_H = nn.Parameter(first_log_rates(heads))
        self.skip_H = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(values, values // config.groups, config.norm_eps, F.silu, gate_first=True)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        convolved, gate = self.inputs(x).split((self.config.convolved_size, self.config.values_size), dim=-1)
        return convolved, gate

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

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        assert of.skip is not None
        y: torch.Tensor = self.norm(out + of.skip, of.gate)
        return y
