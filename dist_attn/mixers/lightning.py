"""Lightning attention: the state of each head forgets at a constant rate of its own."""

from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.recurrent import GatedNorm, Recurrence, RecurrentMixer, split_heads_last
from dist_attn.model_config.mixers.recurrent import LightningConfig


def slopes(config: LightningConfig, device: torch.device) -> torch.Tensor:
    """What each head's log decay is the negative of, [H] in float64."""
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
        self.inputs = nn.Linear(config.hidden_size, 2 * keys + 2 * values, bias=False)
        group = values if config.norm == "whole" else config.value_size
        self.norm = GatedNorm(values, group, config.norm_eps, torch.sigmoid)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        projected = self.inputs(x)
        return projected[..., :0], projected

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        keys, values = config.keys_size, config.values_size
        *qkv, gate = rest.split((keys, keys, values, values), dim=-1)
        q, k, v = (split_heads_last(F.silu(t), config.num_heads) for t in qkv)
        dtype = torch.promote_types(x.dtype, torch.float32)
        log_decay = -slopes(config, x.device).to(dtype)[:, None].expand(*q.shape[:-1], 1)
        return Recurrence(q, k, v, log_decay, gate)

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        y: torch.Tensor = self.norm(out, of.gate)
        return y
