"""Mixers that are scans of one number or more for each channel: Mamba, and Griffin's recurrent block (RG-LRU).

Letters: B batch, L tokens on this rank, D model width, E inner channels, N numbers of a channel's state, R rank of the
map to the steps, H blocks of W channels, K taps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer, require_own, state_zeros
from dist_attn.mixers.heads import ShortConvolution
from dist_attn.mixers.linear_layers import Linear
from dist_attn.model_config.mixers.scans import MambaConfig, RgLruConfig
from dist_attn.ops import SequenceOps, gated_step, selective_step
from dist_attn.ops.device import send, without_autocast

SHARPNESS = 8.0  # of RG-LRU: c of a = sigmoid(decay)^(c r)
FIRST_DECAYS = (0.9, 0.999)  # what a token leaves of a state where its gate is open, at first
LEAST_SHARE = 1e-12  # of 1 - a^2: the derivative of its root has no end


@dataclass(frozen=True)
class MambaState(FieldsState):
    """The memory of every channel, and the last tokens that the short convolution still needs."""

    x_BEN: torch.Tensor
    tail_BKE: torch.Tensor


class _Chosen(NamedTuple):
    """The coefficients that tokens choose, [B, L, ·] or [B, ·] of one token."""

    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


@final
class Mamba(TokenMixer):
    """out(scan(silu(conv(x))) * silu(z)), x and z = in(tokens).

    Steps and decays are computed in float32 outside any autocast: decays near 1 have no digits left in bf16.

    Reference: Gu and Dao 2023, Mamba, Sec. 3.4.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        size, inner, rank = config.hidden_size, config.inner_size, config.step_rank
        self.in_proj = Linear(size, 2 * inner, bias=config.projection_bias)
        self.convolution = ShortConvolution(inner, config.short_convolution, bias=config.convolution_bias)
        self.x_proj = Linear(inner, rank + 2 * config.state_size, bias=False)
        self.dt_ER = nn.Parameter((2 * torch.rand(inner, rank) - 1) * rank**-0.5)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        first_E = (low + (high - low) * torch.rand(inner)).exp()
        self.dt_bias_E = nn.Parameter(first_E + (-torch.expm1(-first_E)).log())  # softplus of it is the step
        numbers_N = torch.arange(1, config.state_size + 1, dtype=torch.float32, device=first_E.device)
        self.log_a_EN = nn.Parameter(numbers_N.log().expand(inner, -1).clone())
        self.skip_E = nn.Parameter(torch.ones(inner))
        self.out = Linear(inner, size, bias=config.projection_bias)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, MambaState]:
        before = self._own(state, x_BLD.shape[0])
        x_BLE, z_BLE = self.in_proj(x_BLD).chunk(2, dim=-1)
        x_BLE, tail_BKE = self.convolution(x_BLE.to(before.tail_BKE.dtype), ops, before.tail_BKE)
        x_BLE = F.silu(x_BLE)
        dt, b, c = self._chosen(x_BLE)
        y_BLE, after = ops.selective_scan(x_BLE, dt, self._a(), b, c, skip_D=self.skip_E, state=before.x_BEN)
        return self.out(y_BLE * F.silu(z_BLE)), MambaState(after, tail_BKE)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, MambaState]:
        before = self._own(state, x_BD.shape[0])
        x_BE, z_BE = self.in_proj(x_BD).chunk(2, dim=-1)
        x_BE, tail_BKE = self.convolution.step(x_BE.to(before.tail_BKE.dtype), before.tail_BKE)
        x_BE = F.silu(x_BE)
        dt, b, c = self._chosen(x_BE)
        y_BE, after = selective_step(x_BE, dt, self._a(), b, c, before.x_BEN, skip_D=self.skip_E)
        return self.out(y_BE * F.silu(z_BE)), MambaState(after, tail_BKE)

    def initial_state(self, batch: int) -> MambaState:
        size = (batch, self.config.inner_size, self.config.state_size)
        dtype = torch.promote_types(self.log_a_EN.dtype, torch.float32)
        return MambaState(state_zeros(self.log_a_EN, size).to(dtype), self.convolution.initial_tail(batch))

    def _chosen(self, x: torch.Tensor) -> _Chosen:
        size = self.config.state_size
        low, b, c = self.x_proj(x).split([self.config.step_rank, size, size], dim=-1)
        with without_autocast(x.device):
            dt = F.softplus(F.linear(low.to(self.dt_ER.dtype), self.dt_ER, self.dt_bias_E))
        return _Chosen(dt, b, c)

    def _a(self) -> torch.Tensor:
        return -self.log_a_EN.exp()

    def _own(self, state: MixerState | None, batch: int) -> MambaState:
        if state is None:
            return self.initial_state(batch)
        inner = self.config.inner_size
        shapes = [(batch, inner, self.config.state_size), (batch, self.config.short_convolution - 1, inner)]
        return require_own(state, MambaState, self.config.kind, shapes)


@dataclass(frozen=True)
class RgLruState(FieldsState):
    """The memory of every channel, the last tokens that the convolution still needs, and whether there were any."""

    h_BE: torch.Tensor
    tail_BKE: torch.Tensor
    begun_B: torch.Tensor


@final
class RecurrentBlock(TokenMixer):
    """out(lru(conv(x)) * gelu(y)), x and y linear in the tokens; h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t.

    Gates and decays are computed in float32 outside any autocast. The first token of a sequence or document enters
    whole, without the factor sqrt(1 - a^2), as in RecurrentGemma.

    Reference: De et al. 2024, Griffin, Eq. 1 to 4.
    """

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: RgLruConfig) -> None:
        super().__init__()
        self.config = config
        size, inner, heads = config.hidden_size, config.inner_size, config.num_heads
        self.in_proj = Linear(size, 2 * inner)
        self.convolution = ShortConvolution(inner, config.short_convolution, bias=True)
        width = inner // heads
        self.gates_2HWW = nn.Parameter(torch.randn(2, heads, width, width) * width**-0.5)
        self.gate_biases_2E = nn.Parameter(torch.zeros(2, inner))
        low, high = FIRST_DECAYS
        log_a_E = (low + (high - low) * torch.rand(inner)).log()
        self.decay_E = nn.Parameter(torch.expm1(-log_a_E / SHARPNESS).log())
        self.out = Linear(inner, size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, RgLruState]:
        before = self._own(state, x_BLD.shape[0])
        x_BLE, y_BLE = self.in_proj(x_BLD).chunk(2, dim=-1)
        x_BLE, tail_BKE = self.convolution(x_BLE.to(before.tail_BKE.dtype), ops, before.tail_BKE)
        length, device = x_BLD.shape[1], x_BLD.device
        places = ops.document_places(length)
        first_L = send(places.position_L == 0, device)
        goes_on_BL = before.begun_B[:, None] & (ops.positions(length, device) == 0) & places.goes_on
        added_BLE, log_a_BLE = self._gated(x_BLE, first_L & ~goes_on_BL)
        h_BLE, after = ops.gated_scan(added_BLE, log_a_BLE, state=before.h_BE)
        begun_B = before.begun_B | (ops.total_length(length) > 0)
        return self.out(h_BLE * F.gelu(y_BLE, approximate="tanh")), RgLruState(after, tail_BKE, begun_B)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, RgLruState]:
        before = self._own(state, x_BD.shape[0])
        x_BE, y_BE = self.in_proj(x_BD).chunk(2, dim=-1)
        x_BE, tail_BKE = self.convolution.step(x_BE.to(before.tail_BKE.dtype), before.tail_BKE)
        added_BE, log_a_BE = self._gated(x_BE, ~before.begun_B)
        h_BE, after = gated_step(added_BE, log_a_BE, before.h_BE)
        begun_B = torch.ones_like(before.begun_B)
        return self.out(h_BE * F.gelu(y_BE, approximate="tanh")), RgLruState(after, tail_BKE, begun_B)

    def initial_state(self, batch: int) -> RgLruState:
        dtype = torch.promote_types(self.decay_E.dtype, torch.float32)
        h_BE = state_zeros(self.decay_E, (batch, self.config.inner_size)).to(dtype)
        begun_B = torch.zeros(batch, dtype=torch.bool, device=h_BE.device)
        return RgLruState(h_BE, self.convolution.initial_tail(batch), begun_B)

    def _gated(self, x: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gated inputs of the state and the logarithms of its decays; the inputs of `first` tokens enter whole."""
        with without_autocast(x.device):
            wide = x.to(self.gates_2HWW.dtype)
            by_head = wide.flatten(0, -2).unflatten(-1, (self.config.num_heads, -1)).transpose(0, 1)
            logits = (by_head @ self.gates_2HWW).transpose(1, 2).flatten(2) + self.gate_biases_2E[:, None]
            input_gate, decay_gate = logits.sigmoid().unflatten(1, x.shape[:-1]).unbind(0)
            log_a = -SHARPNESS * F.softplus(self.decay_E) * decay_gate
            share = (-torch.expm1(2 * log_a)).clamp_min(LEAST_SHARE).sqrt()
            return torch.where(first[..., None], 1.0, share) * input_gate * wide, log_a

    def _own(self, state: MixerState | None, batch: int) -> RgLruState:
        if state is None:
            return self.initial_state(batch)
        inner = self.config.inner_size
        shapes = [(batch, inner), (batch, self.config.short_convolution - 1, inner), (batch,)]
        return require_own(state, RgLruState, self.config.kind, shapes)
