"""S4D and S4: a diagonal, or diagonal plus low-rank, state space for every feature, as a scan or as one convolution.

Letters: B batch, L tokens on this rank, D model width, N numbers (or complex pairs) of a feature's state.
"""

import math
from typing import final

import torch
from torch import nn

from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, WholeSequenceMixer, state_zeros
from dist_attn.ops import SequenceOps
from dist_attn_papers.mixers.state_space import Readout, StateSpaceState, own_state
from dist_attn_papers.mixers.state_space_configs import S4Config, S4DConfig
from dist_attn_papers.ops import dense_scan, diagonal_scan, long_convolve
from dist_attn_papers.ops.dense_space import matrix_power
from dist_attn_papers.ops.state_space import (
    diagonal_kernel,
    discretise,
    discretise_dense,
    dplr_kernel,
    initial_eigenvalues,
    initial_inputs,
    legs_eigenvalues,
    real_form,
)


class DiagonalSpace(nn.Module):
    """The parameters of one diagonal system per feature; real parts stay negative.

    B is fixed, since only its product with C matters and C is learned: B is 1, or HiPPO's for the spectrum `legs`,
    which model folders hold too.

    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2022 (S4D).
    """

    b_N: torch.Tensor

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
        b_N = initial_inputs(config.spectrum, pairs).float()
        self.register_buffer("b_N", b_N, persistent=config.spectrum == "legs")

    def discrete(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a, b, c [D, N] of x_t = a x_{t-1} + b u_t, y_t = 2 Re(c x_t)."""
        a_DN = torch.complex(-self.log_decay_DN.exp(), self.frequency_DN)
        a, b = discretise(a_DN, self.b_N.to(a_DN.dtype).expand_as(a_DN), self.log_dt_D.exp(), self.config.rule)
        return a, b, torch.view_as_complex(self.c_DN2)

    def kernel(self, length: int) -> torch.Tensor:
        """The response to a unit input, [length, D]."""
        return diagonal_kernel(*self.discrete(), length)


@final
class S4DScan(TokenMixer):
    """The recurrent form: causal, with a state of constant size."""

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: S4DConfig) -> None:
        super().__init__()
        self.config = config
        self.space = DiagonalSpace(config)
        self.readout = Readout(config.hidden_size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BLD.shape[0]))
        y_BLD, after = diagonal_scan(x_BLD, *self.space.discrete(), state=torch.view_as_complex(before.x), ops=ops)
        return self.readout(y_BLD, x_BLD), before.replace((torch.view_as_real(after),))

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BD.shape[0]))
        a, b, c = self.space.discrete()
        after = a * torch.view_as_complex(before.x) + b * x_BD[..., None]
        y_BD = 2 * (c * after).sum(-1).real
        return self.readout(y_BD.to(x_BD.dtype), x_BD), before.replace((torch.view_as_real(after),))

    def initial_state(self, batch: int) -> StateSpaceState:
        return StateSpaceState(state_zeros(self.space.c_DN2, (batch, *self.space.c_DN2.shape)), self.config.kind)


Dense = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LowRankSpace(nn.Module):
    """The parameters of A = Lambda - P P^*, B, C and a time step per feature; HiPPO-LegS at first.

    Reference: A Unified View of Long-Sequence Models, Sec. 7; Gu et al. 2021 (S4), with Q = P as in its later versions.
    """

    def __init__(self, config: S4Config) -> None:
        super().__init__()
        size, pairs = config.hidden_size, config.state_size // 2
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        lambda_N, b_N, p_N = legs_eigenvalues(config.state_size)
        self.log_dt_D = nn.Parameter(low + (high - low) * torch.rand(size))
        self.log_decay_DN = nn.Parameter((-lambda_N.real).log().float().expand(size, pairs).clone())
        self.frequency_DN = nn.Parameter(lambda_N.imag.float().expand(size, pairs).clone())
        self.p_DN2 = nn.Parameter(torch.view_as_real(p_N).float().expand(size, pairs, 2).clone())
        self.b_DN2 = nn.Parameter(torch.view_as_real(b_N).float().expand(size, pairs, 2).clone())
        self.c_DN2 = nn.Parameter(torch.randn(size, pairs, 2) * 0.5**0.5)

    def discrete(self) -> Dense:
        """A [D, N, N], b [D, N] and C [D, 1, N] of the trapezoidal system over real and imaginary parts."""
        a_DNN, b_DN, c_D1N = real_form(*self._parts())
        a, b = discretise_dense(a_DNN, b_DN, self.log_dt_D.exp(), 0.5)
        return a, b, c_D1N

    def kernel(self, length: int) -> torch.Tensor:
        """The response to a unit input, [length, D]."""
        a_DNN, _, _ = self.discrete()
        left_over_DNN = torch.eye(a_DNN.shape[1], dtype=a_DNN.dtype, device=a_DNN.device) - matrix_power(a_DNN, length)
        return dplr_kernel(*self._parts(), self.log_dt_D.exp(), left_over_DNN, length)

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        lambda_DN = torch.complex(-self.log_decay_DN.exp(), self.frequency_DN)
        p_DN, b_DN, c_DN = (torch.view_as_complex(t) for t in (self.p_DN2, self.b_DN2, self.c_DN2))
        return lambda_DN, p_DN, b_DN, c_DN


@final
class S4Scan(TokenMixer):
    """The recurrent form: causal, with a state of constant size."""

    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: S4Config) -> None:
        super().__init__()
        self.config = config
        self.space = LowRankSpace(config)
        self.readout = Readout(config.hidden_size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BLD.shape[0]))
        y_BLDM, after = dense_scan(x_BLD, *self.space.discrete(), state=before.x, ops=ops)
        return self.readout(y_BLDM.squeeze(-1), x_BLD), before.replace((after,))

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, StateSpaceState]:
        before = own_state(state, self.initial_state(x_BD.shape[0]))
        a_DNN, b_DN, c_D1N = self.space.discrete()
        after = (a_DNN @ before.x[..., None])[..., 0] + b_DN * x_BD[..., None]
        y_BD = (c_D1N @ after[..., None])[..., 0, 0]
        return self.readout(y_BD.to(x_BD.dtype), x_BD), before.replace((after,))

    def initial_state(self, batch: int) -> StateSpaceState:
        size = (batch, self.config.hidden_size, self.config.state_size)
        return StateSpaceState(state_zeros(self.space.c_DN2, size), self.config.kind)


@final
class StateSpaceConvolution(WholeSequenceMixer):
    """The convolution form, over a sequence that is there whole; with a second system for what comes after a token."""

    paradigm = Paradigm.LEARNED_DEPENDENT

    name = "a state space as a convolution"

    def __init__(self, config: S4DConfig | S4Config) -> None:
        super().__init__()
        self.config = config
        self.space = _space(config)
        self.space_ahead = _space(config) if config.bidirectional else None
        self.readout = Readout(config.hidden_size)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        length = ops.total_length(x_BLD.shape[1])
        ahead = None if self.space_ahead is None else self.space_ahead.kernel(length)
        y_BLD = long_convolve(x_BLD, self.space.kernel(length), backward_kernel_LD=ahead, ops=ops)
        mixed: torch.Tensor = self.readout(y_BLD, x_BLD)
        return mixed


def _space(config: S4DConfig | S4Config) -> DiagonalSpace | LowRankSpace:
    return DiagonalSpace(config) if isinstance(config, S4DConfig) else LowRankSpace(config)


def s4d(config: S4DConfig) -> TokenMixer:
    """The form that the configuration asks for."""
    return S4DScan(config) if config.form == "scan" else StateSpaceConvolution(config)


def s4(config: S4Config) -> TokenMixer:
    """The form that the configuration asks for."""
    return S4Scan(config) if config.form == "scan" else StateSpaceConvolution(config)
