"""Gated linear attention: the state of a head forgets each number of its keys at a rate that the token says."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.recurrent import GatedNorm, LowRankGate, Recurrence, RecurrentMixer, split_heads_last
from dist_attn.model_config.mixers.recurrent import GlaConfig


@final
class GatedLinearAttention(RecurrentMixer):
    """S_t = diag(sigmoid(gate(x_t))^(1/16)) S_{t-1} + k_t v_t^T, out(norm(q_t^T S_t / sqrt(K)) * silu(z_t)).

    Reference: Yang et al. 2023, Gated Linear Attention Transformers, Sec. 4.4.
    """

    config: GlaConfig

    def __init__(self, config: GlaConfig) -> None:
        super().__init__(config)
        size, keys, values = config.hidden_size, config.keys_size, config.values_size
        self.inputs = nn.Linear(size, 2 * keys + 2 * values, bias=False)
        self.decay = LowRankGate(size, config.gate_rank, keys, bias=torch.zeros(keys))
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, F.silu)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = self.inputs(x)
        return projected[..., :0], projected

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        keys, values = config.keys_size, config.values_size
        *qkv, gate = rest.split((keys, keys, values, values), dim=-1)
        decay = F.logsigmoid(self.decay(x)) / config.gate_divisor
        q, k, v, log_decay = (split_heads_last(t, config.num_heads) for t in (*qkv, decay))
        return Recurrence(q * config.key_size**-0.5, k, v, log_decay, gate)

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        y: torch.Tensor = self.norm(out, of.gate)
        return y
