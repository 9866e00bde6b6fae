"""Mamba: a state space for every inner channel, whose steps, inputs and read-outs the tokens choose.

Letters: B batch, L tokens on this rank, D model width, E inner channels, N numbers of a channel's state, R rank of the
map to the steps, K taps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer, require_own, state_zeros
from dist_attn.mixers.heads import ShortConvolution
from dist_attn.model_config.mixers.scans import MambaConfig
from dist_attn.ops import SequenceOps, selective_step
from dist_attn.ops.device import without_autocast


@dataclass(frozen=True)
class MambaState(FieldsState):
    """What every channel remembers, and the last tokens that the short convolution still needs."""

    x_BEN: torch.Tensor
    tail_BKE: torch.Tensor


class _Chosen(NamedTuple):
    """What tokens choose, [B, L, ·] or [B, ·] of one token."""

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
        self.in_proj = nn.Linear(size, 2 * inner, bias=config.projection_bias)
        self.convolution = ShortConvolution(inner, config.short_convolution, bias=config.convolution_bias)
        self.x_proj = nn.Linear(inner, rank + 2 * config.state_size, bias=False)
        self.dt_ER = nn.Parameter((2 * torch.rand(inner, rank) - 1) * rank**-0.5)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        first_E = (low + (high - low) * torch.rand(inner)).exp()
        self.dt_bias_E = nn.Parameter(first_E + (-torch.expm1(-first_E)).log())  # softplus of it is the step
        numbers_N = torch.arange(1, config.state_size + 1, dtype=torch.float32, device=first_E.device)
        self.log_a_EN = nn.Parameter(numbers_N.log().expand(inner, -1).clone())
        self.skip_E = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, size, bias=config.projection_bias)

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
