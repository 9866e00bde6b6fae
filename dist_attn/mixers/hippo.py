"""HiPPO-LegS as a mixer: every feature's whole past as a polynomial, and a learned reading of its coefficients."""

import math
from typing import final

import torch
from torch import nn

from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, require_own
from dist_attn.mixers.state_space import Readout
from dist_attn.model_config.mixers.state_spaces import HippoConfig
from dist_attn.ops import LegsState, SequenceOps, legs_step


@final
class LegsMemory(TokenMixer):
    """glu(out(gelu(y + d x))), y = read . c for every feature, c the coefficients of its past.

    Nothing of the memory is learned: it weighs all of the past alike, at a resolution that falls with its length, and
    has no time scale to choose. `ops.reconstruct` gives back the signal.

    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2020 (HiPPO), LegS.
    """

    paradigm = Paradigm.FIXED_DEPENDENT

    def __init__(self, config: HippoConfig) -> None:
        super().__init__()
        self.config = config
        self.read_DN = nn.Parameter(torch.randn(config.hidden_size, config.state_size) / math.sqrt(config.state_size))
        self.readout = Readout(config.hidden_size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, LegsState]:
        y_BLD, after = ops.legs_memory(
            x_BLD, self.read_DN, state=None if state is None else self._own(state, x_BLD.shape[0])
        )
        return self.readout(y_BLD, x_BLD), after

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, LegsState]:
        after = legs_step(x_BD, self._own(state, x_BD.shape[0]))
        y_BD = (after.c_BDN.to(self.read_DN.dtype) * self.read_DN).sum(2)
        return self.readout(y_BD.to(x_BD.dtype), x_BD), after

    def initial_state(self, batch: int) -> LegsState:
        return LegsState.empty(batch, self.config.hidden_size, self.config.state_size, device=self.read_DN.device)

    def _own(self, state: MixerState, batch: int) -> LegsState:
        config = self.config
        shapes = [(batch, config.hidden_size, config.state_size), (batch,)]
        return require_own(state, LegsState, config.kind, shapes)
