"""What implementations by kernels share: named tensors, the state behind a call, gradients of gradients.

Kernels have a backward pass of their own, which autograd cannot look into. A gradient that is to be differentiated
again therefore goes through the same function in the streaming form, all of whose operations autograd knows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.linear_attention.call import LinearCall, OutputBuffers
from dist_attn.ops.linear_attention.streaming import stream_absorb, stream_attention, stream_sums
from dist_attn.ops.scan import plain_gradients
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import watching

Each = TypeVar("Each")
Named = TypeVar("Named", bound=tuple[torch.Tensor | None, ...])


class Inputs(NamedTuple, Generic[Each]):
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


Tensors = Inputs[torch.Tensor | None]


class Results(NamedTuple):
    """What an attention leaves, or the gradients of it: outputs, S after the last key, z beside the mass."""

    out: torch.Tensor | None
    s: torch.Tensor
    zm: torch.Tensor


@dataclass(frozen=True)
class Terms:
    """What a call is about beside its tensors: all of it that a graph may hold on to."""

    feature_map: FeatureMap | None
    denominator: Denominator
    documents: tuple[int, ...] = ()
    undivided: bool = False  # outputs are numerators, denominators and masses
    buffers: OutputBuffers | None = None

    def for_backward(self) -> "Terms":
        """Without the buffer of outputs: a graph that held its own output would never be freed."""
        return self if self.buffers is None else replace(self, buffers=self.buffers._replace(out=None))

    def call(self, x: Tensors) -> LinearCall:
        """The call of these tensors."""
        k, v, s, zm = present(x.k), present(x.v), present(x.s), present(x.zm)
        return LinearCall(
            k if x.q is None else x.q,
            k,
            v,
            x.log_gate,
            x.key_scale,
            feature_map=self.map_of(x.w),
            state=state_of(s, zm),
            denominator=self.denominator,
            documents=self.documents,
        )

    def map_of(self, w: torch.Tensor | None) -> FeatureMap | None:
        """The feature map over this value of its tensor."""
        if self.feature_map is None or w is None:
            return self.feature_map
        return self.feature_map.with_tensors(w)

    def replay(self, x: Tensors) -> tuple[torch.Tensor | None, ...]:
        """The results of these tensors, by operations that autograd knows."""
        call = self.call(x)
        if x.q is None:
            return None, *sums_of(stream_absorb(call))
        out, after = stream_sums(call) if self.undivided else stream_attention(call)
        return out, *sums_of(after)


def inputs_of(call: LinearCall, state: LinearState) -> Tensors:
    """The tensors of a call from this state."""
    w = next(iter(call.map_tensors), None)
    return Inputs(*call.sequence, *sums_of(state), w)


def present(x: torch.Tensor | None) -> torch.Tensor:
    """A tensor that is never left out."""
    assert x is not None
    return x


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


def gradients_of_replay(
    replay: Callable[[Named], tuple[torch.Tensor | None, ...]],
    tensors: Named,
    needs: Sequence[bool],
    grads: Sequence[torch.Tensor | None],
) -> Named:
    """The gradients of all tensors as differentiable functions of the tensors and of `grads`, those of the results."""
    # Aliases, so that gradients stop here and do not run on into what the inputs were computed from.
    aliases = (t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needs, strict=True))
    inputs = type(tensors)(*aliases)  # type: ignore[arg-type]  # a named tuple takes its fields one by one
    with watching(None):
        results = replay(inputs)
    return type(tensors)(*plain_gradients(results, tuple(grads), inputs, needs))  # type: ignore[arg-type]
