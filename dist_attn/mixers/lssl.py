"""LSSL: a state space with a full matrix, HiPPO-LegS at first, stepped at a speed of its own for every feature."""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, state_zeros
from dist_attn.mixers.state_space import StateSpaceState, own_state
from dist_attn.model_config.mixers.state_spaces import LsslConfig
from dist_attn.ops import SequenceOps
from dist_attn.ops.state_space import discretise_dense, legs


@final
class LinearStateSpace(TokenMixer):
    """out(gelu(y + d x)), y the M outputs of x' = A x + B u for every feature.

    A and B are those of LegS, fixed or learned together by all features; each feature learns its time step.

    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2021 (LSSL).
    """

    a_NN: torch.Tensor
    b_N: torch.Tensor

    def __init__(self, config: LsslConfig) -> None:
        super().__init__()
        self.config = config
        size, outputs = config.hidden_size, config.outputs
        a_NN, b_N, _ = (t.float() for t in legs(config.state_size))
        if config.transition == "learned":
            self.a_NN, self.b_N = nn.Parameter(a_NN), nn.Parameter(b_N)
        else:
            self.register_buffer("a_NN", a_NN)
            self.register_buffer("b_N", b_N)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_dt_D = nn.Parameter(low + (high - low) * torch.rand(size))
        self.c_DMN = nn.Parameter(torch.randn(size, outputs, config.state_size) / config.state_size**0.5)
        self.skip_DM = nn.Parameter(torch.randn(size, outputs))
        self.out = nn.Linear(size * outputs, size)

    @property
    def paradigm(self) -> Paradigm:
        """Fixed as LegS is, or learned."""
        fixed = self.config.transition == "fixed"
        return Paradigm.FIXED_DEPENDENT if fixed else Paradigm.LEARNED_DEPENDENT

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BLD.shape[0]))
        y_BLDM, after = ops.dense_scan(x_BLD, *self._discrete(), self.c_DMN, state=before.x)
        return self._read(y_BLDM, x_BLD), before.replace((after,))

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BD.shape[0]))
        a_DNN, b_DN = self._discrete()
        after = (a_DNN @ before.x[..., None])[..., 0] + b_DN * x_BD[..., None]
        return self._read((self.c_DMN @ after[..., None])[..., 0].to(x_BD.dtype), x_BD), before.replace((after,))

    def initial_state(self, batch: int) -> StateSpaceState:
        size, _, modes = self.c_DMN.shape
        return StateSpaceState(state_zeros(self.c_DMN, (batch, size, modes)), self.config.kind)

    def _discrete(self) -> tuple[torch.Tensor, torch.Tensor]:
        return discretise_dense(self.a_NN, self.b_N, self.log_dt_D.exp(), self.config.alpha)

    def _read(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.out(F.gelu(y + self.skip_DM * x[..., None]).flatten(-2))
        return mixed
