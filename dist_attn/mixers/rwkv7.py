"""The time mixing of RWKV-7: what a key reads of the state is taken away along it, at rates for each channel."""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.recurrent import LowRankGate, Recurrence, RecurrentMixer, TokenShift, split_heads_last, unit_norm
from dist_attn.model_config.mixers.delta_rules import Rwkv7Config

LARGEST_DECAY = math.exp(-0.5)  # what a step takes of a logarithm at most
_UNIT_EPS = 1e-24


@final
class Rwkv7(RecurrentMixer):
    """S_t = (diag(w_t) - (a_t kappa_t) kappa_t^T) S_{t-1} + k_t v_t^T, out((norm(r_t^T S_t) + (r_t . u k_t) v_t) g_t).

    Values are not mixed with those of the first layer.

    Reference: Peng et al. 2025, RWKV-7 "Goose", Eq. 3 to 18.
    """

    config: Rwkv7Config

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__(config)
        size, heads, keys, values = config.hidden_size, config.num_heads, config.keys_size, config.values_size
        self.convolution = TokenShift()
        # Shares of the token before in what makes r, the decay, k, v, the rate a and the output gate.
        self.share_6D = nn.Parameter(torch.full((6, size), 0.5))
        self.receptance, self.key = (nn.Linear(size, keys, bias=False) for _ in range(2))
        self.value = nn.Linear(size, values, bias=False)
        spread = torch.linspace(-6.0, 0.0, keys)
        self.decay = LowRankGate(size, config.decay_rank, keys, bias=spread, between=torch.tanh)
        self.rate = LowRankGate(size, config.rate_rank, keys, bias=torch.zeros(keys))
        self.out_gate = LowRankGate(size, config.gate_rank, values, bias=None, between=torch.sigmoid)
        self.kappa_HK = nn.Parameter(torch.ones(heads, config.key_size))
        self.replaced_HK = nn.Parameter(torch.ones(heads, config.key_size))
        self.bonus_HK = nn.Parameter(torch.zeros(heads, config.key_size))
        self.norm_weight_HV = nn.Parameter(torch.ones(heads, config.value_size))
        self.norm_bias_HV = nn.Parameter(torch.zeros(heads, config.value_size))

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x[..., :0]

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        heads, change = self.config.num_heads, convolved - x
        for_r, for_decay, for_k, for_v, for_rate, for_gate = (x + change * share for share in self.share_6D)
        r, k, v = self.receptance(for_r), self.key(for_k), self.value(for_v)
        r, k, v, rate, decay = (
            split_heads_last(t, heads) for t in (r, k, v, self.rate(for_rate), self.decay(for_decay))
        )
        rate = torch.sigmoid(rate)
        kappa = unit_norm(k * self.kappa_HK, _UNIT_EPS)
        k = k * (1 + (rate - 1) * self.replaced_HK)
        skip = (r * k * self.bonus_HK).sum(-1, keepdim=True) * v
        return Recurrence(
            r,
            k,
            v,
            log_decay=-LARGEST_DECAY * torch.sigmoid(decay),
            gate=self.out_gate(for_gate),
            erase=(-rate * kappa, kappa),
            skip=skip,
        )

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        assert of.skip is not None
        dtype = torch.promote_types(out.dtype, torch.float32)
        y = F.layer_norm(out.to(dtype), out.shape[-1:], eps=self.config.norm_eps)
        y = y * self.norm_weight_HV + self.norm_bias_HV + of.skip
        return (y.flatten(-2) * of.gate).to(out.dtype)
