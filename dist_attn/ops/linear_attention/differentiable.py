"""Linear attention as an operation of kernels: its tensors by name, its results, and the state behind a call.

Shape letters: B batch, H heads, L tokens, V values, M features.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.kernel_operation import Each, KernelOperation, Tensors, present
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall, OutputBuffers
from dist_attn.ops.linear_attention.streaming import stream_absorb, stream_attention, stream_sums
from dist_attn.ops.state import LinearState


class LinearInputs(NamedTuple, Generic[Each]):
    """A value for each tensor of an attention: the tensor, its gradient, or whether that is asked for.

    `s` is S before the first token, `zm` z beside the mass, `w` the feature map's tensor. Without q keys are absorbed.
    """

    q: Each
    k: Each
    v: Each
    log_gate: Each
    key_scale: Each
    s: Each
    zm: Each
    w: Each


LinearTensors = LinearInputs[torch.Tensor | None]


class Results(NamedTuple):
    """The results of an attention, or their gradients: outputs, S after the last key, z beside the mass."""

    out: torch.Tensor | None
    s: torch.Tensor
    zm: torch.Tensor

    @staticmethod
    def of(tensors: Tensors) -> "Results":
        """The results of an operation, or their gradients."""
        out, s, zm = tensors
        return Results(out, present(s), present(zm))


@dataclass(frozen=True)
class LinearTerms(KernelOperation[LinearTensors]):
    """Attention of one call: what it is about beside its tensors, which is all that a graph may hold on to."""

    feature_map: FeatureMap | None
    denominator: Denominator
    documents: tuple[int, ...] = ()
    undivided: bool = False  # outputs are numerators, denominators and masses
    buffers: OutputBuffers | None = None

    @classmethod
    def of(cls, call: LinearCall, *, undivided: bool = False, **more: Any) -> Self:
        """The terms of a call, and `more` fields of a subclass."""
        policy = Denominator("one") if undivided else call.denominator
        return cls(call.feature_map, policy, call.documents, undivided, call.buffers, **more)

    def for_backward(self) -> Self:
        """Without the buffer of outputs: a graph that held its own output would never be freed."""
        return self if self.buffers is None else replace(self, buffers=self.buffers._replace(out=None))

    def call(self, x: LinearTensors) -> LinearCall:
        """The call of these tensors."""
        k, v, s, zm = present(x.k), present(x.v), present(x.s), present(x.zm)
        return LinearCall(
            k if x.q is None else x.q,
            k,
            v,
            x.log_gate,
            x.key_scale,
            feature_map=map_of(self.feature_map, x.w),
            state=state_of(s, zm),
            denominator=self.denominator,
            documents=self.documents,
        )

    def replay(self, x: LinearTensors) -> Tensors:
        call = self.call(x)
        if x.q is None:
            return None, *sums_of(stream_absorb(call))
        out, after = stream_sums(call) if self.undivided else stream_attention(call)
        return out, *sums_of(after)

    def attend(self, call: LinearCall, before: LinearState) -> tuple[torch.Tensor, LinearState]:
        """Outputs of the call from this state, and the state after the last key."""
        results = Results.of(self(inputs_of(call, before)))
        return present(results.out), state_after(before, results, call)

    def absorb(self, call: LinearCall, before: LinearState) -> LinearState:
        """The state after the last key of the call, from this one."""
        return state_after(before, Results.of(self(inputs_of(call, before)._replace(q=None))), call)


def inputs_of(call: LinearCall, state: LinearState) -> LinearTensors:
    """The tensors of a call from this state."""
    return LinearInputs(*call.sequence, *sums_of(state), call.map_tensor)


def map_of(feature_map: FeatureMap | None, w: torch.Tensor | None) -> FeatureMap | None:
    """The feature map over this value of its tensor."""
    return feature_map if feature_map is None or w is None else feature_map.with_tensors(w)


def state_after(before: LinearState, results: Results, call: LinearCall) -> LinearState:
    """The state behind a call from its sums, and what the gates say of its decay."""
    log_decay_BH, reset_BH, documents = before.log_decay_BH, before.reset_BH, call.documents
    if documents:
        log_decay_BH, reset_BH = torch.zeros_like(log_decay_BH), torch.ones_like(reset_BH)
    if call.log_gate_BHS is not None:
        last = documents[-1] if documents else 0
        log_decay_BH = log_decay_BH + bounded(call.log_gate_BHS[:, :, last:], torch.float32).sum(-1)
    return LinearState(results.s, results.zm[..., :-1], results.zm[..., -1], log_decay_BH, reset_BH)


def state_of(s: torch.Tensor, zm: torch.Tensor) -> LinearState:
    """A state of S [B, H, M, V] and z beside the mass [B, H, M + 1] that nothing has decayed."""
    nothing = zm.new_zeros(zm.shape[:2])
    return LinearState(s, zm[..., :-1], zm[..., -1], nothing, nothing.bool())


def sums_of(state: LinearState) -> tuple[torch.Tensor, torch.Tensor]:
    """S, and z beside the mass."""
    return state.s_BHMV, torch.cat([state.z_BHM, state.mass_BH[..., None]], dim=-1)


def converted(grad: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient in the type of its tensor, where there are both."""
    return None if grad is None or like is None else grad.to(like.dtype)
