"""Random feature attention, plain and gated (RFA and RFA-Gate)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.feature_maps import ArcCosine, Gaussian
from dist_attn.mixers.base import MixerState, TokenMixer, state_zeros
from dist_attn.mixers.config import RandomFeatureConfig
from dist_attn.mixers.heads import ShortConvolution, linear_float32, merge_heads, split_heads
from dist_attn.mixers.key_weights import log_key_weights, stable_key_weights, step_key_weights
from dist_attn.mixers.random_matrices import matrices_at_test, matrices_of_step
from dist_attn.mixers.rotary import rotate
from dist_attn.ops import Denominator, FeatureMap, LinearState, SequenceOps, linear_attention_step

__all__ = ["RandomFeatureAttention", "RandomFeatureState"]

# Gate biases are spread over the heads so that time scales from about 2 to 150 tokens exist from the first step.
GATE_BIAS_RANGE = (-1.0, 5.0)


@dataclass(frozen=True)
class RandomFeatureState:
    """The attention state, the last tokens that the short convolution still needs, and how far rotary positions are.

    With key weights (`weighting = "norm"`) the attention state is held in units of exp(unit), which cancel in outputs.
    """

    attention: LinearState
    tail_BKD: torch.Tensor
    position_B: torch.Tensor | None = None  # tokens so far, where positions are rotary
    unit_BH: torch.Tensor | None = None  # float64, where keys have weights

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        optional = (t for t in (self.position_B, self.unit_BH) if t is not None)
        return (*self.attention.tensors(), self.tail_BKD, *optional)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "RandomFeatureState":
        """The same kind of state over other tensors."""
        count = len(self.attention.tensors())
        optional = iter(tensors[count + 1 :])
        position_B = None if self.position_B is None else next(optional)
        unit_BH = None if self.unit_BH is None else next(optional)
        return RandomFeatureState(LinearState(*tensors[:count]), tensors[count], position_B, unit_BH)

    def advanced(
        self, attention: LinearState, tail_BKD: torch.Tensor, tokens: int, unit_BH: torch.Tensor | None
    ) -> "RandomFeatureState":
        """The state after `tokens` more, with what they leave behind."""
        position_B = None if self.position_B is None else self.position_B + tokens
        return RandomFeatureState(attention, tail_BKD, position_B, unit_BH)


class RandomFeatureAttention(TokenMixer):
    """Multi-head RFA: learned sigma per head, fixed random vectors; optional scalar gates.

    Queries and keys have unit norm, or keys the weights of those that have not.

    Reference: Random Feature Attention, Eq. 5 to 9; gate per head (Eq. 7), initialised over a spread of time scales;
    Eq. 12 (`weighting = "norm"`).
    """

    w_HDK: torch.Tensor

    def __init__(self, config: RandomFeatureConfig) -> None:
        super().__init__()
        self.config = config
        size, heads, head_size = config.hidden_size, config.num_heads, config.head_size
        self.convolution = ShortConvolution(size, config.short_convolution) if config.short_convolution else None
        self.qkv = nn.Linear(size, sum(config.qkv_sizes), bias=config.projection_bias)
        self.out = nn.Linear(config.qkv_sizes[2], size, bias=config.projection_bias)
        self.sigma_H1K = nn.Parameter(torch.full((heads, 1, head_size), config.first_sigma))
        self.register_buffer("w_HDK", matrices_at_test(config))
        # The pool's matrices of this training step; None at test, and without a pool.
        self._drawn_HDK: torch.Tensor | None = None
        self.gate: nn.Linear | None = None
        if config.kind == "rfa_gate":
            self.gate = nn.Linear(size, 1 if config.shared_gate else heads)
            with torch.no_grad():
                self.gate.weight.normal_(std=0.02)
                biases = torch.linspace(*GATE_BIAS_RANGE, heads)
                self.gate.bias.copy_(biases.mean() if config.shared_gate else biases)
        self.denominator = Denominator(config.denominator.kind, config.denominator.eps)

    def redraw(self, step: int) -> bool:
        """Take the pool's matrices of a training step; whether there is a pool, and so a state of other features."""
        if not self.config.pool:
            return False
        self._drawn_HDK = matrices_of_step(self.config, step).to(self.w_HDK)
        return True

    def feature_map(self) -> FeatureMap:
        """phi with the learned sigma multiplied in (RFA Eq. 8); float32 always."""
        drawn_HDK = self._drawn_HDK if self.training else None
        w_HDK = self.sigma_H1K * (self.w_HDK if drawn_HDK is None else drawn_HDK)
        if self.config.feature == "gaussian":
            return Gaussian(w_HDK, unit_norm=self.config.weighting == "unit_norm")
        return ArcCosine(w_HDK, unit_norm=True)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, RandomFeatureState]:
        before = self._own(state, x_BLD.shape[0])
        tail_BKD = before.tail_BKD
        if self.convolution is not None:
            x_BLD, tail_BKD = self.convolution(x_BLD, ops, tail_BKD)
        q, k, v = (split_heads(t, self.config.num_heads) for t in self.qkv(x_BLD).split(self.config.qkv_sizes, dim=-1))
        if before.position_B is not None:
            positions_BL = before.position_B[:, None] + ops.positions(x_BLD.shape[1]).to(x_BLD.device)
            q, k = (rotate(t, positions_BL, self.config.rotary) for t in (q, k))
        log_gate, key_scale = (None if t is None else t.transpose(1, 2) for t in self._gates(x_BLD))
        unit_BH = before.unit_BH
        if unit_BH is not None:
            log_gate, key_scale, unit_BH = stable_key_weights(
                log_key_weights(k, self.sigma_H1K), ops, unit_BH, log_gate_BHS=log_gate, key_scale_BHS=key_scale
            )
        out_BHLV, attention = ops.linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map(),
            log_gate_BHS=log_gate,
            key_scale_BHS=key_scale,
            causal=True,
            state=before.attention,
            denominator=self.denominator,
        )
        total = ops.total_length(x_BLD.shape[1])
        return self.out(merge_heads(out_BHLV)), before.advanced(attention, tail_BKD, total, unit_BH)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, RandomFeatureState]:
        before = self._own(state, x_BD.shape[0])
        tail_BKD = before.tail_BKD
        if self.convolution is not None:
            x_BD, tail_BKD = self.convolution.step(x_BD, tail_BKD)
        q, k, v = (
            t.unflatten(-1, (self.config.num_heads, -1)) for t in self.qkv(x_BD).split(self.config.qkv_sizes, dim=-1)
        )
        if before.position_B is not None:
            q, k = (rotate(t[:, :, None], before.position_B[:, None], self.config.rotary).squeeze(2) for t in (q, k))
        log_gate, key_scale = self._gates(x_BD)
        unit_BH = before.unit_BH
        if unit_BH is not None:
            log_gate, key_scale, unit_BH = step_key_weights(
                log_key_weights(k, self.sigma_H1K), unit_BH, log_gate_BH=log_gate, key_scale_BH=key_scale
            )
        out_BHV, attention = linear_attention_step(
            q,
            k,
            v,
            before.attention,
            feature_map=self.feature_map(),
            log_gate_BH=log_gate,
            key_scale_BH=key_scale,
            denominator=self.denominator,
        )
        return self.out(out_BHV.flatten(1)), before.advanced(attention, tail_BKD, 1, unit_BH)

    def initial_state(self, batch: int) -> RandomFeatureState:
        config = self.config
        features = config.num_random * (2 if config.feature == "gaussian" else 1)
        weight = self.qkv.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        attention = LinearState.identity(
            batch, config.num_heads, features, config.value_size, dtype=dtype, device=weight.device
        )
        position_B = None
        if config.rotary is not None:
            position_B = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        unit_BH = None
        if config.weighting == "norm":
            unit_BH = torch.zeros(batch, config.num_heads, dtype=torch.float64, device=weight.device)
        if self.convolution is None:
            tail_BKD = state_zeros(weight, (batch, 0, config.hidden_size))
        else:
            tail_BKD = self.convolution.initial_tail(batch)
        return RandomFeatureState(attention, tail_BKD, position_B, unit_BH)

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """log g and 1 - g, [..., H], each from the logit itself so that neither loses digits near 0 or 1."""
        if self.gate is None:
            return None, None
        logit = linear_float32(self.gate, x)
        if self.config.shared_gate:
            logit = logit.expand(*logit.shape[:-1], self.config.num_heads)
        return F.logsigmoid(logit), torch.sigmoid(-logit)

    def _own(self, state: MixerState | None, batch: int) -> RandomFeatureState:
        if state is None:
            return self.initial_state(batch)
        if not isinstance(state, RandomFeatureState):
            raise InputError(f"a {type(state).__name__} was given to random feature attention; it needs its own state")
        return state
