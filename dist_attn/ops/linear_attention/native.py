"""Linear attention by C kernels for processors: features made where they are used, chunk by chunk, heads in parallel.

A chunk's features, scores and states never leave the cache of the core that works on a head. Sums are float32; numbers
below 1e-38 count as 0. Each head is one thread's work from beginning to end, so results do not depend on the number of
threads, nor on what else is in the batch or in the packed row.

`implementation.choose` says whether a call can come here.
"""

from dataclasses import replace
from typing import Any

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.denominator import Denominator
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
    state_of,
    sums_of,
)
from dist_attn.ops.linear_attention.native_call import TYPES, num_features
from dist_attn.ops.linear_attention.native_passes import (
    ReadInputs,
    ReadTensors,
    attend,
    attend_backward,
    read,
    read_backward,
)
from dist_attn.ops.linear_attention.streaming import stream_attention, stream_completed_sums
from dist_attn.ops.state import LinearState


def native_linear_attention(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of any shape: what queries and keys share, keys behind, queries behind."""
    state = call.state
    outputs: list[torch.Tensor] = []
    shared = min(call.queries, call.keys) if call.causal else 0
    if state is not None and not shared:
        state.check(*_state_sizes(call))
    if shared:
        whole = shared == call.queries == call.keys
        out, state = _attend(call if whole else call.part(slice(shared), slice(shared)))
        outputs.append(out)
    if shared < call.keys:
        state = native_absorb_keys(replace(call.part(slice(0), slice(shared, None)), state=state))
    assert state is not None  # there were keys, or a state was given
    if shared < call.queries:
        outputs.append(_read(call.part(slice(shared, None), slice(0)), state, None))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def native_local_sums(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`local_sums`: float32 [B, H, L, V + 2] of numerators, denominators and masses, and the state after."""
    return _attend(replace(call, denominator=Denominator("one")), undivided=True)


def native_absorb_keys(call: LinearCall) -> LinearState:
    """`absorb_keys` of a call without documents, whose queries count for nothing."""
    before = _state_before(call)
    inputs = inputs_of(call, before)._replace(q=None)
    results = Results(None, *_Attention.apply(Terms(call.feature_map, Denominator("one")), *inputs))  # type: ignore[no-untyped-call]
    return state_after(before, results, call)


def native_completed_sums(call: LinearCall, sums_BHLX: torch.Tensor) -> torch.Tensor:
    """`complete_sums`: the call's queries read its state, decayed by the gates so far, beside the sums there are."""
    assert call.state is not None  # what the sums are completed by
    return _read(call, call.state, sums_BHLX)


def _attend(call: LinearCall, *, undivided: bool = False) -> tuple[torch.Tensor, LinearState]:
    """Causal attention of as many queries as keys."""
    before = _state_before(call)
    terms = Terms(call.feature_map, call.denominator, call.documents, undivided, call.buffers)
    results = Results(*_Attention.apply(terms, *inputs_of(call, before)))  # type: ignore[no-untyped-call]
    return present(results.out), state_after(before, results, call)


def _read(call: LinearCall, state: LinearState, sums_BHLX: torch.Tensor | None) -> torch.Tensor:
    """Outputs in v's dtype of queries that all read one state; without sums there are no gates to decay it."""
    batch, heads, tokens, size = call.q_BHLK.shape
    values, log_gate = state.s_BHMV.shape[3], None if sums_BHLX is None else call.log_gate_BHS
    state.check(batch, heads, num_features(call.feature_map, size), values)
    for name, tensor, needed in (("sums", sums_BHLX, (tokens, values + 2)), ("log_gate", log_gate, (tokens,))):
        if tensor is not None and tensor.shape != (batch, heads, *needed):
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; needed here is {(batch, heads, *needed)}")
    out_dtype = call.v_BHSV.dtype
    written = out_dtype if out_dtype in TYPES else torch.float32
    buffers = call.buffers if written == out_dtype else None
    terms = Terms(call.feature_map, call.denominator, buffers=buffers)
    w = next(iter(call.map_tensors), None)
    out: torch.Tensor = _Read.apply(terms, written, call.q_BHLK, log_gate, sums_BHLX, *sums_of(state), w)  # type: ignore[no-untyped-call]
    return out.to(out_dtype)


def _state_sizes(call: LinearCall) -> tuple[int, int, int, int]:
    batch, heads, _, size = call.k_BHSK.shape
    return batch, heads, num_features(call.feature_map, size), call.v_BHSV.shape[3]


def _state_before(call: LinearCall) -> LinearState:
    sizes = _state_sizes(call)
    if call.state is None:
        return LinearState.identity(*sizes)
    call.state.check(*sizes)
    return call.state


class _Attention(torch.autograd.Function):
    """Tensors of an attention -> outputs, if there are queries, S and z beside the mass."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, *tensors: torch.Tensor | None) -> Any:
        inputs: Tensors = Inputs(*tensors)
        (out, s, zm), kept, _ = attend(terms, inputs, keep=any(ctx.needs_input_grad))
        ctx.terms = terms.for_backward()
        if kept is not None:
            ctx.save_for_backward(*inputs, None if terms.undivided else out, kept)
        return (s, zm) if out is None else (out, s, zm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        *tensors, out, kept = ctx.saved_tensors
        inputs: Tensors = Inputs(*tensors)
        _, *asked = ctx.needs_input_grad
        needs, results = Inputs(*asked), Results(*grads) if inputs.q is not None else Results(None, *grads)
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *gradients_of_replay(ctx.terms.replay, inputs, needs, results))
        return (None, *attend_backward(ctx.terms, inputs, needs, results, out=out, kept=kept))


class _Read(torch.autograd.Function):
    """Tensors of a read -> outputs in `out_dtype`."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, out_dtype: torch.dtype, *tensors: torch.Tensor | None) -> Any:
        inputs: ReadTensors = ReadInputs(*tensors)
        out = read(terms, inputs, out_dtype)
        ctx.terms = terms.for_backward()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*inputs, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        terms: Terms = ctx.terms
        *tensors, out = ctx.saved_tensors
        inputs: ReadTensors = ReadInputs(*tensors)
        _, _, *asked = ctx.needs_input_grad
        needs = ReadInputs(*asked)

        def replay(x: ReadTensors) -> tuple[torch.Tensor]:
            q, s, zm = present(x.q), present(x.s), present(x.zm)
            nothing = s[:, :, :0].to(out.dtype)
            call = terms.call(Inputs(q, q, nothing, x.log_gate, None, s, zm, x.w))
            if x.sums is not None:
                return (stream_completed_sums(call, x.sums),)
            return (stream_attention(call.reading(state_of(s, zm)))[0],)

        if torch.is_grad_enabled():
            return (None, None, *gradients_of_replay(replay, inputs, needs, (grad_out,)))
        return (None, None, *read_backward(terms, inputs, needs, out, grad_out))
