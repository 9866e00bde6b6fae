"""The base of causal kernel attentions with any feature map: projections, positions, gates, a walk over a state."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import MixerState, TokenMixer, require_own
from dist_attn.mixers.heads import (
    HeadInputs,
    ProjectedAttention,
    linear_float32,
    merge_heads,
    rotate,
    stable_key_weights,
    step_key_weights,
)
from dist_attn.model_config.mixers.kernels import (
    KernelCosts,
    PositiveConfig,
    RandomFeatureConfig,
)
from dist_attn.ops import Denominator, LinearState, SequenceOps
from dist_attn.ops.device import send
from dist_attn.ops.running_maximum import NO_TOKENS


@dataclass(frozen=True)
class KernelState:
    """The attention state, the last tokens that the short convolution still needs, and how far rotary positions are.

    Where keys have weights the attention state is held in units of exp(unit), which cancel in outputs. `kind` is the
    mixer's: features of another kind may be as many, and mean something else.
    """

    attention: LinearState
    tail_BKD: torch.Tensor
    kind: str
    position_B: torch.Tensor | None = None  # tokens so far, where positions are rotary
    unit_BH: torch.Tensor | None = None  # float64, where keys have weights

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        optional = (t for t in (self.position_B, self.unit_BH) if t is not None)
        return (*self.attention.tensors(), self.tail_BKD, *optional)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "KernelState":
        """Return a state of the same kind over other tensors."""
        count = len(self.attention.tensors())
        optional = iter(tensors[count + 1 :])
        position_B = None if self.position_B is None else next(optional)
        unit_BH = None if self.unit_BH is None else next(optional)
        return KernelState(LinearState(*tensors[:count]), tensors[count], self.kind, position_B, unit_BH)


def _positions(before_B: torch.Tensor, ops: SequenceOps, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [B, L] of the tokens held here and [B] behind the last one of all ranks.

    Features of a turned query and key depend on more than their distance, so that every document begins at 0.
    """
    places = ops.document_places(length)
    goes_on_L = (places.number_L == 0) & places.goes_on
    at_L, goes_on_L = (send(x_L, before_B.device) for x_L in (places.position_L, goes_on_L))
    *earlier, last = places.lengths_N or (0,)
    begun_B = before_B if places.goes_on and not earlier else torch.zeros_like(before_B)
    return before_B[:, None] * goes_on_L + at_L, begun_B + last


class KernelMixer(TokenMixer):
    """A mixer that leaves a `KernelState` behind, of the sizes that its configuration says."""

    config: KernelCosts
    # The log of the unit of a state without tokens, where keys have weights; these may be as small as they like.
    first_unit = NO_TOKENS

    @abstractmethod
    def initial_tail(self, batch: int) -> torch.Tensor:
        """The tail before any token."""

    def initial_state(self, batch: int) -> KernelState:
        config, tail_BKD = self.config, self.initial_tail(batch)
        dtype, device = torch.promote_types(tail_BKD.dtype, torch.float32), tail_BKD.device
        attention = LinearState.identity(
            batch, config.num_heads, config.num_features, config.value_size, dtype=dtype, device=device
        )
        position_B = unit_BH = None
        if config.counts_positions:
            position_B = torch.zeros(batch, dtype=torch.int64, device=device)
        if config.weighs_keys:
            unit_BH = torch.full((batch, config.num_heads), self.first_unit, dtype=torch.float64, device=device)
        return KernelState(attention, tail_BKD, config.kind, position_B, unit_BH)

    def own(self, state: MixerState | None, batch: int) -> KernelState:
        """The state as this mixer's, or its first one.

        Raises: InputError for that of another mixer.
        """
        if state is None:
            return self.initial_state(batch)
        config, each = self.config, (batch, self.config.num_heads)
        sums = [(*each, config.num_features, config.value_size), (*each, config.num_features), each, each, each]
        shapes: list[tuple[int, ...]] = [*sums, (batch, max(0, config.taps - 1), config.hidden_size)]
        if config.counts_positions:
            shapes.append((batch,))
        if config.weighs_keys:
            shapes.append(each)
        return require_own(state, KernelState, config.kind, shapes)


# Gate biases are spread over the heads so that time scales from about 2 to 150 tokens exist from the first step.
GATE_BIAS_RANGE = (-1.0, 5.0)


class CausalKernelAttention(ProjectedAttention, KernelMixer):
    """Multi-head attention over a state of constant size; a kind of it says how it attends, and by which features.

    Reference: Random Feature Attention, Eq. 6; with gates Eq. 7, which begin over a spread of time scales.
    """

    config: RandomFeatureConfig | PositiveConfig

    def __init__(self, config: RandomFeatureConfig | PositiveConfig) -> None:
        super().__init__(config)
        size, heads = config.hidden_size, config.num_heads
        self.gate: nn.Linear | None = None
        if config.gated:
            self.gate = nn.Linear(size, 1 if config.shared_gate else heads)
            with torch.no_grad():
                self.gate.weight.normal_(std=0.02)
                biases = torch.linspace(*GATE_BIAS_RANGE, heads)
                self.gate.bias.copy_(biases.mean() if config.shared_gate else biases)
        self.denominator = Denominator(config.denominator.kind, config.denominator.eps)

    def log_key_weights(self, k: torch.Tensor) -> torch.Tensor | None:
        """Logarithms of the weights of keys [B, H, S, K] or, of one token, [B, H, K]; None where all weigh the same."""
        return None

    @abstractmethod
    def attend(self, heads: HeadInputs, ops: SequenceOps, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        """The outputs of the queries, [B, H, L, V], and the state after the last global token."""

    @abstractmethod
    def attend_step(self, heads: HeadInputs, state: LinearState) -> tuple[torch.Tensor, LinearState]:
        """`attend` for one token, [B, H, V]."""

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BLD.shape[0])
        x_BLD, tail_BKD = self.convolved(x_BLD, ops, before.tail_BKD)
        q, k, v, *_ = self.heads(x_BLD)
        position_B = before.position_B
        if position_B is not None:
            positions_BL, position_B = _positions(position_B, ops, x_BLD.shape[1])
            q, k = (rotate(t, positions_BL, self.config.rotary) for t in (q, k))
        log_gate, key_scale = (None if t is None else t.transpose(1, 2) for t in self._gates(x_BLD))
        weights, unit_BH = self.log_key_weights(k), before.unit_BH
        if weights is not None and unit_BH is not None:
            log_gate, key_scale, unit_BH = stable_key_weights(
                weights, ops, unit_BH, log_gate_BHS=log_gate, key_scale_BHS=key_scale
            )
        out_BHLV, attention = self.attend(HeadInputs(q, k, v, log_gate, key_scale), ops, before.attention)
        after = replace(before, attention=attention, tail_BKD=tail_BKD, position_B=position_B, unit_BH=unit_BH)
        return self.out(merge_heads(out_BHLV)), after

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BD.shape[0])
        x_BD, tail_BKD = self.convolved_step(x_BD, before.tail_BKD)
        sizes, heads = self.config.qkv_sizes, self.config.num_heads
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in self.qkv(x_BD).split(sizes, dim=-1))
        position_B = before.position_B
        if position_B is not None:
            q, k = (rotate(t[:, :, None], position_B[:, None], self.config.rotary).squeeze(2) for t in (q, k))
            position_B = position_B + 1
        log_gate, key_scale = self._gates(x_BD)
        weights, unit_BH = self.log_key_weights(k), before.unit_BH
        if weights is not None and unit_BH is not None:
            log_gate, key_scale, unit_BH = step_key_weights(
                weights, unit_BH, log_gate_BH=log_gate, key_scale_BH=key_scale
            )
        out_BHV, attention = self.attend_step(HeadInputs(q, k, v, log_gate, key_scale), before.attention)
        after = replace(before, attention=attention, tail_BKD=tail_BKD, position_B=position_B, unit_BH=unit_BH)
        return self.out(out_BHV.flatten(1)), after

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """log g and 1 - g, [..., H], each from the logit itself so that neither loses digits near 0 or 1."""
        if self.gate is None:
            return None, None
        logit = linear_float32(self.gate, x)
        if self.config.shared_gate:
            logit = logit.expand(*logit.shape[:-1], self.config.num_heads)
        return F.logsigmoid(logit), torch.sigmoid(-logit)
