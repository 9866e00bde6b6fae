"""State spaces with a full matrix (HiPPO-LegS, LSSL), and what all state-space mixers share: state and read-out.

Letters: B batch, L tokens on this rank, D model width, N numbers of a feature's state, M outputs of a feature.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer, require_own, state_zeros
from dist_attn.ops import SequenceOps
from dist_attn_papers.mixers.state_space_configs import HippoConfig, LsslConfig
from dist_attn_papers.ops import LegsState, dense_scan, legs_memory, legs_step
from dist_attn_papers.ops.state_space import discretise_dense, legs


@dataclass(frozen=True)
class StateSpaceState(FieldsState):
    """The memory of every feature's system, [B, D, …] in real numbers; `kind` is the mixer's."""

    x: torch.Tensor
    kind: str


class Readout(nn.Module):
    """glu(out(gelu(y + d x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.skip_D = nn.Parameter(torch.randn(size))
        self.out = nn.Linear(size, 2 * size)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.glu(self.out(F.gelu(y + self.skip_D * x)), dim=-1)


def own_state(state: MixerState | None, first: StateSpaceState) -> StateSpaceState:
    """A state that belongs to the mixer whose state before any token is `first`, or `first` itself.

    Raises: InputError for the state of another mixer.
    """
    if state is None:
        return first
    return require_own(state, StateSpaceState, first.kind, [tuple(first.x.shape)])


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
        y_BLD, after = legs_memory(
            x_BLD, self.read_DN, state=None if state is None else self._own(state, x_BLD.shape[0]), ops=ops
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
        y_BLDM, after = dense_scan(x_BLD, *self._discrete(), self.c_DMN, state=before.x, ops=ops)
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
