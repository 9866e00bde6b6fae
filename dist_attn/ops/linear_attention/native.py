"""Linear attention by C kernels for processors: features made where they are used, chunk by chunk, heads in parallel.

A chunk's features, scores and states never leave the cache of the core that works on a head. Sums are float32; numbers
below 1e-38 count as 0. Each head is one thread's work from beginning to end, so results do not depend on the number of
threads, nor on what else is in the batch or in the packed row.

`implementation.choose` says whether a call can come here.

Shape letters: B batch, H heads, L tokens, V values, X = V + 2 (numerators, denominators, masses), E = M + 1 (z beside
the mass of M features).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.c_call import TYPES
from dist_attn.ops.kernel_operation import KernelOperation, Tensors, gradients_of_replay, present
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import (
    LinearInputs,
    LinearTensors,
    LinearTerms,
    Results,
    inputs_of,
    state_after,
    state_of,
    sums_of,
)
from dist_attn.ops.linear_attention.native_call import num_features
from dist_attn.ops.linear_attention.native_passes import (
    NativeReadInputs,
    ReadTensors,
    adjoint_read,
    attend,
    attend_backward,
    read,
    read_backward,
)
from dist_attn.ops.linear_attention.streaming import stream_attention, stream_completed_sums
from dist_attn.ops.state import LinearState


def native_linear_attention(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of any shape: what queries and keys share, keys behind, queries behind."""
    state = None if call.state is None else _state_before(call)
    outputs: list[torch.Tensor] = []
    shared = min(call.queries, call.keys) if call.causal else 0
    if shared:
        whole = shared == call.queries == call.keys
        part = call if whole else call.part(slice(shared), slice(shared))
        out, state = _Attention.of(part).attend(part, _state_before(part))
        outputs.append(out)
    if shared < call.keys:
        state = native_absorb_keys(replace(call.part(slice(0), slice(shared, None)), state=state))
    assert state is not None  # there were keys, or a state was given
    if shared < call.queries:
        outputs.append(_read(call.part(slice(shared, None), slice(0)), state, None))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def native_local_sums(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`local_sums`: float32 [B, H, L, V + 2] of numerators, denominators and masses, and the state after."""
    return _Attention.of(call, undivided=True).attend(call, _state_before(call))


def native_absorb_keys(call: LinearCall) -> LinearState:
    """`absorb_keys` of a call without documents, whose queries count for nothing."""
    return _Attention.of(call).absorb(call, _state_before(call))


def native_completed_sums(call: LinearCall, sums_BHLX: torch.Tensor) -> torch.Tensor:
    """`complete_sums`: the call's queries read its state, decayed by the gates so far, beside the sums there are."""
    assert call.state is not None  # what the sums are completed by
    return _read(call, call.state, sums_BHLX)


def _read(call: LinearCall, state: LinearState, sums_BHLX: torch.Tensor | None) -> torch.Tensor:
    """Outputs in v's dtype of queries that all read one state; without sums there are no gates to decay it."""
    batch, heads, tokens, size = call.q_BHLK.shape
    values, log_gate = state.s_BHMV.shape[3], None if sums_BHLX is None else call.log_gate_BHS
    state.check(batch, heads, num_features(call.feature_map, size), values)
    for name, tensor, needed in (("sums", sums_BHLX, (tokens, values + 2)), ("log_gate", log_gate, (tokens,))):
        if tensor is not None and tensor.shape != (batch, heads, *needed):
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; needed here is {(batch, heads, *needed)}")
    written = call.v_BHSV.dtype if call.v_BHSV.dtype in TYPES else torch.float32
    terms = replace(_Attention.of(call), documents=(), buffers=call.buffers if written == call.v_BHSV.dtype else None)
    inputs = NativeReadInputs(call.q_BHLK, log_gate, sums_BHLX, *sums_of(state), call.map_tensor)
    (out,) = map(present, _Read(terms, written)(inputs))
    return out.to(call.v_BHSV.dtype)


def _state_before(call: LinearCall) -> LinearState:
    return call.state_before(num_features(call.feature_map, call.k_BHSK.shape[3]))


class _Attention(LinearTerms):
    """Outputs, if there are queries, S and z beside the mass."""

    def forward(self, x: LinearTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        results, kept, _ = attend(self, x, keep=keep)
        return results, (None if self.undivided else results.out, kept)

    def backward(self, x: LinearTensors, needs: LinearTensors, grads: Tensors, kept: Tensors) -> LinearTensors:
        out, states = kept
        return attend_backward(self, x, needs, Results.of(grads), out=out, kept=states)


@dataclass(frozen=True)
class _Read(KernelOperation[ReadTensors]):
    """Outputs in `out_dtype` of queries that all read one state."""

    terms: LinearTerms
    out_dtype: torch.dtype

    def for_backward(self) -> "_Read":
        return replace(self, terms=self.terms.for_backward())

    def forward(self, x: ReadTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        out = read(self.terms, x, self.out_dtype)
        return (out,), (out,)

    def backward(self, x: ReadTensors, needs: ReadTensors, grads: Tensors, kept: Tensors) -> ReadTensors:
        return read_backward(self.terms, x, needs, present(kept[0]), present(grads[0]))

    def replay(self, x: ReadTensors) -> Tensors:
        q, s, zm = present(x.q), present(x.s), present(x.zm)
        call = self.terms.call(LinearInputs(q, q, s[:, :, :0].to(self.out_dtype), x.log_gate, None, s, zm, x.w))
        if x.sums is not None:
            return (stream_completed_sums(call, x.sums),)
        return (stream_attention(call.reading(state_of(s, zm)))[0],)


class _SecondWalk(NamedTuple):
    """The start and the results of the second of `TwoWalks`: the same in every backward pass through one graph."""

    s: torch.Tensor
    zm: torch.Tensor
    out: torch.Tensor
    kept: torch.Tensor


@dataclass
class _Shared:
    """The values that both walks share; the second walk's are there from its backward pass to the first one's."""

    terms: LinearTerms
    second: _SecondWalk | None = None


class TwoWalks:
    """Two walks over one slice of a sequence whose gradients take one: what a rank does without gates.

    The first walk gives the state `behind` that the slice leaves, the second, `attend`, the outputs from the state
    before the slice. Backward the slice's gradients need what has become of its state on later ranks, and these need
    the gradient of the state before them. So the second walk's backward pass walks the queries only, for the gradient
    of the state before, and leaves the rest to the first walk's, which comes when the gradient of the state behind has
    arrived.

    For autograd, outputs are `link` and what the state before adds to them. `link`, a result of the first walk, is what
    the slice's own tensors put into the outputs. Its gradient is therefore that of the outputs, and with it the first
    walk's backward pass has all that the gradients of the slice are made of. Its value is never looked at: the second
    walk computes the sum of both.

    The call's state counts for nothing.
    """

    def __init__(self, call: LinearCall) -> None:
        nothing = _state_before(replace(call, state=None))
        terms = _Attention(call.feature_map, call.denominator)
        self._shared, self._inputs = _Shared(terms), inputs_of(call, nothing)
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
        inputs: LinearTensors = LinearInputs(*tensors)
        results = attend(shared.terms, inputs._replace(q=None), keep=False).results
        ctx.shared = shared
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        v = present(inputs.v)
        return results.s, results.zm, v.new_zeros(()).expand(v.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        shared: _Shared = ctx.shared
        inputs: LinearTensors = LinearInputs(*ctx.saved_tensors)
        _, *asked = ctx.needs_input_grad
        s, zm, grad_out = grads
        behind = Results(
            None,
            torch.zeros_like(present(inputs.s)) if s is None else s,
            torch.zeros_like(present(inputs.zm)) if zm is None else zm,
        )
        second, shared.second = shared.second, None
        keys, of_keys = inputs._replace(q=None), LinearInputs(*asked)._replace(q=False)
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *gradients_of_replay(shared.terms.replay, keys, of_keys, behind))
        if grad_out is None or second is None:
            return (None, *attend_backward(shared.terms, keys, of_keys, behind, out=None, kept=None))
        both = inputs._replace(s=second.s, zm=second.zm)
        results = behind._replace(out=grad_out)
        return (
            None,
            *attend_backward(shared.terms, both, LinearInputs(*asked), results, out=second.out, kept=second.kept),
        )


class _Second(torch.autograd.Function):
    """`link` and the tensors of an attention -> outputs."""

    @staticmethod
    def forward(ctx: Any, shared: _Shared, link: torch.Tensor, *tensors: torch.Tensor | None) -> Any:
        keep = any(ctx.needs_input_grad)
        inputs: LinearTensors = LinearInputs(*tensors)
        passed = attend(shared.terms, inputs, keep=keep, denominators=keep)
        ctx.shared = shared
        if keep:
            ctx.save_for_backward(*inputs, passed.results.out, passed.kept, passed.den_mass)
        return passed.results.out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        shared: _Shared = ctx.shared
        *tensors, out, kept, den_mass = ctx.saved_tensors
        inputs: LinearTensors = LinearInputs(*tensors)
        _, needs_link, *asked = ctx.needs_input_grad
        needs = LinearInputs(*asked)
        if torch.is_grad_enabled():  # as in `_First`: here the slice's tensors get their gradients without a link
            grads = (grad_out, None, None)
            return (None, None, *gradients_of_replay(shared.terms.replay, inputs, needs, grads))
        s, zm = present(inputs.s), present(inputs.zm)
        if needs_link:
            shared.second = _SecondWalk(s, zm, out, kept)
        of_state = LinearInputs[torch.Tensor | None](*(None for _ in inputs))
        if needs.s or needs.zm:
            grad_s, grad_zm = adjoint_read(shared.terms, inputs, out, den_mass, grad_out)
            of_state = of_state._replace(s=grad_s, zm=grad_zm)
        return (None, grad_out if needs_link else None, *of_state)
