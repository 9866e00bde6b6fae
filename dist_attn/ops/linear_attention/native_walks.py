"""Two walks of the C kernels over one slice of a sequence whose gradients take one: what a rank does without gates.

The first walk gives the state that the slice leaves behind, the second the outputs from the state before the slice.
Backward the slice's gradients need what has become of its state on later ranks, and these need the gradient of the
state before them. So the second walk's backward pass walks the queries only, for the gradient of the state before, and
leaves the rest to the first walk's, which comes when the gradient of the state behind has arrived.

For autograd, outputs are `link` and what the state before adds to them. `link`, a result of the first walk, is what the
slice's own tensors put into the outputs. Its gradient is therefore that of the outputs, and with it the first walk's
backward pass has all that the gradients of the slice are made of. Its value is never looked at: the second walk
computes the sum of both.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import (
    Inputs,
    Results,
    Tensors,
    Terms,
    gradients_of_replay,
    inputs_of,
    present,
    state_after,
    sums_of,
)
from dist_attn.ops.linear_attention.native_call import num_features
from dist_attn.ops.linear_attention.native_passes import adjoint_read, attend, attend_backward
from dist_attn.ops.state import LinearState


class _SecondWalk(NamedTuple):
    """What the second walk began with and left: the same in every backward pass through one graph."""

    s: torch.Tensor
    zm: torch.Tensor
    out: torch.Tensor
    kept: torch.Tensor


@dataclass
class _Shared:
    """What both walks know. The second one is at hand from its backward pass to the first one's, and then freed."""

    terms: Terms
    second: _SecondWalk | None = None


class TwoWalks:
    """Causal attention of one slice, without gates: `behind` is what its keys leave, `attend` gives its outputs.

    The call's state counts for nothing.
    """

    def __init__(self, call: LinearCall) -> None:
        batch, heads, _, size = call.k_BHSK.shape
        nothing = LinearState.identity(batch, heads, num_features(call.feature_map, size), call.v_BHSV.shape[3])
        self._shared, self._inputs = _Shared(Terms(call.feature_map, call.denominator)), inputs_of(call, nothing)
        s_BHMV, zm_BHE, self._link = _First.apply(self._shared, *self._inputs)  # type: ignore[no-untyped-call]
        self.behind = state_after(nothing, Results(None, s_BHMV, zm_BHE), call)

    def attend(self, before: LinearState) -> torch.Tensor:
        """The outputs, from the state before the slice."""
        s_BHMV, zm_BHE = sums_of(before)
        inputs = self._inputs._replace(s=s_BHMV, zm=zm_BHE)
        out: torch.Tensor = _Second.apply(self._shared, self._link, *inputs)  # type: ignore[no-untyped-call]
        return out


class _First(torch.autograd.Function):
    """Tensors of an attention from nothing -> S, z beside the mass, and `link`."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, *tensors: torch.Tensor | None) -> Any:
        inputs: Tensors = Inputs(*tensors)
        results = attend(shared.terms, inputs._replace(q=None), keep=False).results
        ctx.shared = shared
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        v = present(inputs.v)
        return results.s, results.zm, v.new_zeros(()).expand(v.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        shared: _Shared = ctx.shared
        inputs: Tensors = Inputs(*ctx.saved_tensors)
        _, *asked = ctx.needs_input_grad
        s, zm, grad_out = grads
        behind = Results(
            None,
            torch.zeros_like(present(inputs.s)) if s is None else s,
            torch.zeros_like(present(inputs.zm)) if zm is None else zm,
        )
        second, shared.second = shared.second, None
        keys, of_keys = inputs._replace(q=None), Inputs(*asked)._replace(q=False)
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *gradients_of_replay(shared.terms.replay, keys, of_keys, behind))
        if grad_out is None or second is None:
            return (None, *attend_backward(shared.terms, keys, of_keys, behind, out=None, kept=None))
        both = inputs._replace(s=second.s, zm=second.zm)
        results = behind._replace(out=grad_out)
        found = attend_backward(shared.terms, both, Inputs(*asked), results, out=second.out, kept=second.kept)
        return (None, *found)


class _Second(torch.autograd.Function):
    """`link` and the tensors of an attention -> outputs."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, link: torch.Tensor, *tensors: torch.Tensor | None) -> Any:
        keep = any(ctx.needs_input_grad)
        inputs: Tensors = Inputs(*tensors)
        passed = attend(shared.terms, inputs, keep=keep, denominators=keep)
        ctx.shared = shared
        if keep:
            ctx.save_for_backward(*inputs, passed.results.out, passed.kept, passed.den_mass)
        return passed.results.out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        shared: _Shared = ctx.shared
        *tensors, out, kept, den_mass = ctx.saved_tensors
        inputs: Tensors = Inputs(*tensors)
        _, needs_link, *asked = ctx.needs_input_grad
        needs = Inputs(*asked)
        if torch.is_grad_enabled():  # as in `_First`: here the slice's tensors get their gradients without a link
            grads = (grad_out, None, None)
            return (None, None, *gradients_of_replay(shared.terms.replay, inputs, needs, grads))
        s, zm = present(inputs.s), present(inputs.zm)
        if needs_link:
            shared.second = _SecondWalk(s, zm, out, kept)
        of_state = Inputs[torch.Tensor | None](*(None for _ in inputs))
        if needs.s or needs.zm:
            grad_s, grad_zm = adjoint_read(shared.terms, inputs, out, den_mass, grad_out)
            of_state = of_state._replace(s=grad_s, zm=grad_zm)
        return (None, grad_out if needs_link else None, *of_state)
