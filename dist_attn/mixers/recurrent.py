"""The parts that mixers over an affine recurrence share: convolution, the walk over the state, gates, norms of outputs.

Letters: B batch, H heads, L tokens on this rank, K key size, V values, G decays of a head, D model width, R rank of a
gate, O its outputs, T taps, C what is convolved. "..." stands for [B, L], or [B] of one token.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer, require_own
from dist_attn.mixers.heads import ShortConvolution
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.recurrent import RecurrentConfig
from dist_attn.ops import SequenceOps
from dist_attn.ops.affine import AffineState, affine_step, gated_delta_step
from dist_attn.ops.device import without_autocast

KEY_EPS = 1e-6  # under the root of unit queries and keys
Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RecurrentState(FieldsState):
    """The state of every head, and the last tokens that the short convolution still needs; `kind` is the mixer's."""

    s_BHKV: torch.Tensor
    tail_BTC: torch.Tensor
    kind: str


class Recurrence(NamedTuple):
    """The inputs of a recurrence, [..., H, ·], and the gate and the skip that its outputs meet.

    With `beta` [..., H] it is the gated delta rule. `gate` is that of the outputs, [..., H V]; `skip`, [..., H, V], is
    what goes past the state.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor | None = None
    erase: tuple[torch.Tensor, torch.Tensor] | None = None
    skip: torch.Tensor | None = None


class RecurrentMixer(TokenMixer):
    """Projections, perhaps a short convolution, a recurrence for each head, and gated outputs; a kind says which."""

    config: RecurrentConfig
    inputs: nn.Module
    norm: nn.Module
    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.convolution: ShortConvolution | TokenShift | None = None
        self.out = Linear(config.values_size, config.hidden_size, bias=False)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project x into the input of the convolution, [..., C], and the rest, which passes by it."""
        projected, size = self.inputs(x), self.config.convolved_size
        return projected[..., :size], projected[..., size:]

    @abstractmethod
    def recurrence(self, x: torch.Tensor, convolved: torch.Tensor, rest: torch.Tensor) -> Recurrence:
        """The inputs of the recurrence, made of tokens [..., D] and their two projected parts."""

    def mixed(self, out: torch.Tensor, of: Recurrence) -> torch.Tensor:
        """Outputs of the recurrence, [..., H, V], past norm and gate: [..., H V]."""
        y: torch.Tensor = self.norm(out if of.skip is None else out + of.skip, of.gate)
        return y

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, RecurrentState]:
        before = self._own(state, x_BLD.shape[0])
        convolved, rest = self.projected(x_BLD)
        tail_BTC = before.tail_BTC
        if self.convolution is not None:
            convolved, tail_BTC = self.convolution(convolved, ops, tail_BTC)
        of = self.recurrence(x_BLD, convolved, rest)
        q, k, v, log_decay = (t.transpose(1, 2) for t in (of.q, of.k, of.v, of.log_decay))
        first = AffineState(before.s_BHKV)
        if of.beta is not None:
            out, after = ops.gated_delta_rule(
                q, k, v, beta_BHL=of.beta.transpose(1, 2), log_decay_BHLK=log_decay, state=first
            )
        else:
            erase = None if of.erase is None else (of.erase[0].transpose(1, 2), of.erase[1].transpose(1, 2))
            out, after = ops.affine_recurrence(q, k, v, log_decay_BHLK=log_decay, erase=erase, state=first)
        y_BLD: torch.Tensor = self.out(self.mixed(out.transpose(1, 2), of))
        return y_BLD, RecurrentState(after.s_BHKV, tail_BTC, self.config.kind)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, RecurrentState]:
        before = self._own(state, x_BD.shape[0])
        convolved, rest = self.projected(x_BD)
        tail_BTC = before.tail_BTC
        if self.convolution is not None:
            convolved, tail_BTC = self.convolution.step(convolved, tail_BTC)
        of = self.recurrence(x_BD, convolved, rest)
        first = AffineState(before.s_BHKV)
        if of.beta is not None:
            out, after = gated_delta_step(of.q, of.k, of.v, first, beta_BH=of.beta, log_decay_BHK=of.log_decay)
        else:
            out, after = affine_step(of.q, of.k, of.v, first, log_decay_BHK=of.log_decay, erase=of.erase)
        y_BD: torch.Tensor = self.out(self.mixed(out, of))
        return y_BD, RecurrentState(after.s_BHKV, tail_BTC, self.config.kind)

    def initial_state(self, batch: int) -> RecurrentState:
        like = empty_output(self.out)
        wide = torch.promote_types(like.dtype, torch.float32)
        s, tail = self._shapes(batch)
        s_BHKV = torch.zeros(s, dtype=wide, device=like.device)
        tail_BTC = torch.zeros(tail, dtype=like.dtype, device=like.device)
        return RecurrentState(s_BHKV, tail_BTC, self.config.kind)

    def _own(self, state: MixerState | None, batch: int) -> RecurrentState:
        if state is None:
            return self.initial_state(batch)
        return require_own(state, RecurrentState, self.config.kind, self._shapes(batch))

    def _shapes(self, batch: int) -> list[tuple[int, ...]]:
        config = self.config
        kept = max(0, config.taps - 1)
        return [(batch, config.num_heads, config.key_size, config.value_size), (batch, kept, config.convolved_size)]


class TokenShift(nn.Module):
    """The token before each."""

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, tail_B1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of x shifted by one, [B, L, D], and its last token, [B, 1, D], which is the next tail."""
        taps_2D = F.pad(x_BLD.new_ones(1, x_BLD.shape[2]), (0, 0, 1, 0))
        return ops.convolve_streaming(x_BLD, taps_2D, tail_B1D)

    def step(self, x_BD: torch.Tensor, tail_B1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` for one token."""
        return tail_B1D[:, 0], x_BD[:, None]


class LowRankGate(nn.Module):
    """up(between(down(x))) + bias, in the parameters' precision under any autocast: [..., D] -> [..., O]."""

    def __init__(
        self, inputs: int, rank: int, outputs: int, *, bias: torch.Tensor | None, between: Activation | None = None
    ) -> None:
        super().__init__()
        self.between = between
        self.down_RD = nn.Parameter(torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.up_OR = nn.Parameter(torch.empty(outputs, rank).uniform_(-(rank**-0.5), rank**-0.5))
        self.bias_O = None if bias is None else nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with without_autocast(x.device):
            inner = F.linear(x.to(self.down_RD.dtype), self.down_RD)
            return F.linear(inner if self.between is None else self.between(inner), self.up_OR, self.bias_O)


class GatedNorm(nn.Module):
    """Outputs [..., H, V] by their root mean square over `group` numbers, weighed and gated: [..., H V].

    `weights` are those of a group, or of all numbers. `gate_first`: it is what the gate leaves that is normalised.
    """

    def __init__(self, weights: int, group: int, eps: float, gate: Activation, *, gate_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(weights))
        self.group, self.eps, self.gate, self.gate_first = group, eps, gate, gate_first

    def forward(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(out.dtype, torch.float32)
        y, factor = out.flatten(-2).to(dtype), self.gate(gate.to(dtype))
        y = split_heads_last(y * factor if self.gate_first else y, out.flatten(-2).shape[-1] // self.group)
        y = (F.rms_norm(y, (self.group,), eps=self.eps) * self.weight.view(-1, self.group)).flatten(-2)
        return (y if self.gate_first else y * factor).to(out.dtype)


def first_log_rates(heads: int) -> nn.Parameter:
    """Logarithms of rates between 1 and 16, [H], as in Mamba-2."""
    return nn.Parameter(torch.linspace(1.0, 16.0, heads).log())


def first_step_biases(count: int) -> nn.Parameter:
    """Draw biases that softplus takes to steps between 0.001 and 0.1, evenly on a logarithmic scale."""
    return nn.Parameter(torch.empty(count).uniform_(math.log(1e-3), math.log(1e-1)).exp().expm1().log())


def split_heads_last(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., H K] -> [..., H, K]."""
    split: torch.Tensor = x.unflatten(-1, (heads, -1))
    return split


def unit_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
