"""Recurrences that take away what a key reads of the state: Gated DeltaNet, Kimi delta attention, RWKV-7."""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.heads import ShortConvolution, linear_float32
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.recurrent import (
    KEY_EPS,
    GatedNorm,
    LowRankGate,
    Recurrence,
    RecurrentMixer,
    TokenShift,
    first_log_rates,
    first_step_biases,
    split_heads_last,
    unit_norm,
)
from dist_attn.model_config.mixers.delta_rules import GatedDeltaConfig, KimiDeltaConfig, Rwkv7Config


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
        self.inputs = Linear(size, config.convolved_size + config.values_size, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.gate = nn.Linear(size, 2 * heads, bias=False)  # beta's, then the steps'
        self.step_bias_H = nn.Parameter(first_step_biases(heads))
        self.log_rate_H = nn.Parameter(first_log_rates(heads))
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, F.silu)

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        groups = config.num_key_heads
        keys, each = groups * config.key_size, config.num_heads // groups
        qk, v = F.silu(convolved).split((2 * keys, config.values_size), dim=-1)
        q, k = unit_norm(split_heads_last(qk, 2 * groups), KEY_EPS).chunk(2, dim=-2)
        if each > 1:
            q, k = (t.repeat_interleave(each, dim=-2) for t in (q, k))
        written, step = linear_float32(self.gate, x).chunk(2, dim=-1)
        beta, log_decay = torch.sigmoid(written), -self.log_rate_H.exp() * F.softplus(step + self.step_bias_H)
        return Recurrence(
            q * config.key_size**-0.5,
            k,
            split_heads_last(v, config.num_heads),
            log_decay[..., None],
            rest,
            beta=2 * beta if config.allow_negative else beta,
        )


@final
class KimiDeltaAttention(RecurrentMixer):
    """The gated delta rule over unit queries and keys; log decays -A softplus(up(down(x_t)) + bias), one per channel.

    Reference: Kimi Linear, 2025, Eq. 1 and Sec. 4.
    """

    config: KimiDeltaConfig

    def __init__(self, config: KimiDeltaConfig) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.rank
        self.inputs = Linear(size, config.convolved_size, bias=False)
        self.convolution = ShortConvolution(config.convolved_size, config.short_convolution)
        self.gate = nn.Linear(size, config.num_heads, bias=False)  # beta's
        self.steps = LowRankGate(size, rank, config.keys_size, bias=first_step_biases(config.keys_size))
        self.log_rate_H = nn.Parameter(first_log_rates(config.num_heads))
        self.out_gate = LowRankGate(size, rank, config.values_size, bias=None)
        self.norm = GatedNorm(config.value_size, config.value_size, config.norm_eps, torch.sigmoid)

    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        config = self.config
        heads, keys = config.num_heads, config.keys_size
        qk, v = F.silu(convolved).split((2 * keys, config.values_size), dim=-1)
        q, k = unit_norm(split_heads_last(qk, 2 * heads), KEY_EPS).chunk(2, dim=-2)
        log_decay = -self.log_rate_H.exp()[:, None] * F.softplus(split_heads_last(self.steps(x), heads))
        gate, beta = self.out_gate(x), torch.sigmoid(linear_float32(self.gate, x))
        return Recurrence(
            q * config.key_size**-0.5,
            k,
            split_heads_last(v, heads),
            log_decay,
            gate,
            beta=2 * beta if config.allow_negative else beta,
        )


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
        self.receptance, self.key = (Linear(size, keys, bias=False) for _ in range(2))
        self.value = Linear(size, values, bias=False)
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
