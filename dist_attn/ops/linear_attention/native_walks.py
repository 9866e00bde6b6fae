"""Two walks of the C kernels over one slice of a sequence whose gradients take one: what a rank does without gates.

The first walk gives the state that the slice leaves behind, the second the outputs from the state before the slice.
Backward the slice's gradients need what has become of its state on later ranks, and these need the gradient of the
state before them. So the second walk's backward pass walks the queries only, for the gradient of the state before, and
leaves the rest to the first walk's, which comes when the gradient of the state behind has arrived.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.differentiable import (
    Attention,
    Replay,
    again,
    attention_again,
    state_after,
    sums_of,
)
from dist_attn.ops.linear_attention.native_call import num_features
from dist_attn.ops.linear_attention.native_forms import Absorb, absorb_again
from dist_attn.ops.linear_attention.native_passes import Work, adjoint_read, attend, attend_backward
from dist_attn.ops.state import LinearState

__all__ = ["TwoWalks"]


class _Pending(NamedTuple):
    """What the second walk's backward pass leaves to the first's."""

    out: torch.Tensor
    kept: torch.Tensor
    grad_out: torch.Tensor
    s: torch.Tensor
    zm: torch.Tensor


@dataclass
class _Shared:
    work: Work
    absorb_again: Replay
    nothing: LinearState
    pending: _Pending | None = None


class TwoWalks:
    """Causal attention of one slice, without gates: `behind` is what its keys leave, `attend` gives its outputs.

    `attention` and `absorb` are the same in operations that autograd knows.

    Shapes: as `linear_attention`.
    """

    def __init__(
        self,
        q_BHLK: torch.Tensor,
        k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        key_scale_BHL: torch.Tensor | None,
        *,
        feature_map: FeatureMap | None,
        denominator: Denominator,
        attention: Attention,
        absorb: Absorb,
    ) -> None:
        batch, heads, _, size = k_BHLK.shape
        nothing = LinearState.identity(batch, heads, num_features(feature_map, size), v_BHLV.shape[3])
        replay = attention_again(attention, feature_map, denominator, ())
        work = Work(feature_map, denominator, (), False, None, replay)
        self._shared = _Shared(work, absorb_again(absorb, feature_map), nothing)
        parameters = () if feature_map is None else feature_map.tensors()
        self._inputs = (q_BHLK, k_BHLK, v_BHLV, key_scale_BHL, *parameters)
        s_BHMV, zm_BHE, self._link = _First.apply(self._shared, *self._inputs)  # type: ignore[no-untyped-call]
        self.behind = state_after(nothing, s_BHMV, zm_BHE, None, ())

    def attend(self, before: LinearState) -> torch.Tensor:
        """The outputs, from the state before the slice."""
        out: torch.Tensor = _Second.apply(  # type: ignore[no-untyped-call]
            self._shared, self._link, *sums_of(before), *self._inputs
        )
        return out


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: _Shared, *inputs: torch.Tensor | None) -> Any:
        passed = attend(shared.work, _of_keys(shared, inputs), keep=False)
        ctx.shared = shared
        ctx.save_for_backward(*inputs)
        return passed.s, passed.zm, passed.s.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shared: _Shared = ctx.shared
        inputs, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        pending, shared.pending = shared.pending, None
        if not float(grads[2]):
            pending = None  # left by an earlier pass, which had no use for what is asked here
        of_keys = (False, *needs[1:3], False, needs[3], False, False, *needs[4:])
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            found = again(shared.absorb_again, _of_keys(shared, inputs), of_keys, grads[:2])
        elif pending is None:
            behind = (None, grads[0], grads[1])
            found = attend_backward(shared.work, _of_keys(shared, inputs), of_keys, None, None, behind)
        else:
            tensors, all_grads = _of_all(inputs, pending.s, pending.zm), (pending.grad_out, grads[0], grads[1])
            wanted = (needs[0], *of_keys[1:])
            found = attend_backward(shared.work, tensors, wanted, pending.out, pending.kept, all_grads)
        return (None, *found[:3], found[4], *found[7:])


class _Second(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: _Shared, link: torch.Tensor, s: torch.Tensor, zm: torch.Tensor, *inputs: torch.Tensor | None
    ) -> Any:
        keep = any(ctx.needs_input_grad)
        passed = attend(shared.work, _of_all(inputs, s, zm), keep=keep, denominators=keep)
        ctx.shared = shared
        if keep:
            ctx.save_for_backward(s, zm, *inputs, passed.out, passed.kept, passed.den_mass)
        return passed.out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shared: _Shared = ctx.shared
        s, zm, *inputs, out, kept, den_mass = ctx.saved_tensors
        _, links, of_s, of_zm, *needs = ctx.needs_input_grad
        tensors = _of_all(inputs, s, zm)
        if torch.is_grad_enabled():
            wanted = (*needs[:3], False, needs[3], of_s, of_zm, *needs[4:])
            found = again(shared.work.replay, tensors, wanted, (grads[0], None, None))
            return (None, None, *found[5:7], *found[:3], found[4], *found[7:])
        if links:
            shared.pending = _Pending(out, kept, grads[0], s, zm)
        of_state: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if of_s or of_zm:
            of_state = adjoint_read(shared.work, tensors, out, den_mass, grads[0])
        return (None, torch.ones(()) if links else None, *of_state, *(None for _ in inputs))


def _of_keys(shared: _Shared, inputs: Any) -> tuple[torch.Tensor | None, ...]:
    _, k, v, key_scale, *parameters = inputs
    return (None, k, v, None, key_scale, *sums_of(shared.nothing), *parameters)


def _of_all(inputs: Any, s: torch.Tensor, zm: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, key_scale, *parameters = inputs
    return (q, k, v, None, key_scale, s, zm, *parameters)
