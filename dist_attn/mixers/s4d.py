"""S4D: a diagonal state space for every feature, walked along the sequence or taken as one convolution."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.base import MixerState, TokenMixer
from dist_attn.mixers.input_independent_config import S4DConfig
from dist_attn.mixers.whole_sequence import WholeSequenceMixer
from dist_attn.ops import SequenceOps
from dist_attn.ops.state_space import diagonal_kernel, discretise, initial_eigenvalues

__all__ = ["DiagonalSpace", "S4DConvolution", "S4DScan", "S4DState"]


class DiagonalSpace(nn.Module):
    """The parameters of one diagonal system per feature; B is 1, and real parts stay negative.

    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2022 (S4D).
    """

    def __init__(self, config: S4DConfig) -> None:
        super().__init__()
        self.config = config
        size, pairs = config.hidden_size, config.state_size // 2
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        a_N = initial_eigenvalues(config.spectrum, pairs)
        self.log_dt_D = nn.Parameter(low + (high - low) * torch.rand(size))
        self.log_decay_DN = nn.Parameter((-a_N.real).log().float().expand(size, pairs).clone())
        self.frequency_DN = nn.Parameter(a_N.imag.float().expand(size, pairs).clone())
        self.c_DN2 = nn.Parameter(torch.randn(size, pairs, 2) * 0.5**0.5)

    def discrete(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a, b, c [D, N] of x_t = a x_{t-1} + b u_t, y_t = 2 Re(c x_t)."""
        a_DN = torch.complex(-self.log_decay_DN.exp(), self.frequency_DN)
        a, b = discretise(a_DN, torch.ones_like(a_DN), self.log_dt_D.exp(), self.config.rule)
        return a, b, torch.view_as_complex(self.c_DN2)


@dataclass(frozen=True)
class S4DState:
    """What every feature's system remembers, real and imaginary parts."""

    x_BDN2: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.x_BDN2,)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "S4DState":
        """The same kind of state over other tensors."""
        return S4DState(*tensors)


class _Readout(nn.Module):
    """glu(out(gelu(y + d x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.skip_D = nn.Parameter(torch.randn(size))
        self.out = nn.Linear(size, 2 * size)

    def forward(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.glu(self.out(F.gelu(y + self.skip_D * x)), dim=-1)


class S4DScan(TokenMixer):
    """The recurrent form: causal, with a state of constant size."""

    def __init__(self, config: S4DConfig) -> None:
        super().__init__()
        self.config = config
        self.space = DiagonalSpace(config)
        self.readout = _Readout(config.hidden_size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, S4DState]:
        before = self._own(state, x_BLD.shape[0])
        y_BLD, after = ops.diagonal_scan(x_BLD, *self.space.discrete(), state=torch.view_as_complex(before.x_BDN2))
        return self.readout(y_BLD, x_BLD), S4DState(torch.view_as_real(after))

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, S4DState]:
        before = torch.view_as_complex(self._own(state, x_BD.shape[0]).x_BDN2)
        a, b, c = self.space.discrete()
        after = a * before + b * x_BD[..., None]
        y_BD = 2 * (c * after).sum(-1).real
        return self.readout(y_BD.to(x_BD.dtype), x_BD), S4DState(torch.view_as_real(after))

    def initial_state(self, batch: int) -> S4DState:
        return S4DState(self.space.c_DN2.new_zeros((batch, *self.space.c_DN2.shape), requires_grad=False))

    def _own(self, state: MixerState | None, batch: int) -> S4DState:
        if state is None:
            return self.initial_state(batch)
        if not isinstance(state, S4DState):
            raise InputError(f"a {type(state).__name__} was given to a state space; it needs its own state")
        return state


class S4DConvolution(WholeSequenceMixer):
    """The convolution form, over a sequence that is there whole; with a second system for what comes after a token."""

    name = "a state space as a convolution"

    def __init__(self, config: S4DConfig) -> None:
        super().__init__()
        self.config = config
        self.space = DiagonalSpace(config)
        self.space_ahead = DiagonalSpace(config) if config.bidirectional else None
        self.readout = _Readout(config.hidden_size)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        length = ops.total_length(x_BLD.shape[1])
        ahead = None if self.space_ahead is None else diagonal_kernel(*self.space_ahead.discrete(), length)
        y_BLD = ops.long_convolve(x_BLD, diagonal_kernel(*self.space.discrete(), length), backward_kernel_LD=ahead)
        mixed: torch.Tensor = self.readout(y_BLD, x_BLD)
        return mixed
