"""Linear attention in streaming form: cache-sized blocks, a carried state, memory flat in the length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import check_documents, document_runs, split_tokens, start_flags
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import AttentionBlock, Carry
from dist_attn.ops.linear_attention.implementation import Choice, Implementation, choose
from dist_attn.ops.linear_attention.joined import Rooms
from dist_attn.ops.linear_attention.native_forms import natively, natively_absorbed
from dist_attn.ops.linear_attention.prefix import check_prefix, prefix_then_causal
from dist_attn.ops.linear_attention.together import attend_together
from dist_attn.ops.scan import scan
from dist_attn.ops.state import LinearState

__all__ = ["absorb_keys", "linear_attention", "state_dtype"]

# A block of 512 tokens x 8 heads of features, scores and states stays inside the L2/L3 cache; whole tensors
# would be bound by memory traffic (4.4 times slower at 32,768 tokens). More batch x heads, fewer tokens a block.
BLOCK_GROUP_TOKENS = 8 * 512
CHUNK_TOKENS = 64
# Up to this many tokens of whole documents attend by one masked product where attention is not causal. Up to about
# 2 M V / (M + V) tokens that takes fewer multiplications than a state for each document.
TOGETHER_TOKENS = 128

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def linear_attention(
    q_BHLK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    causal: bool = True,
    state: LinearState | None = None,
    denominator: Denominator | None = None,
    documents: tuple[int, ...] | None = None,
    prefix: int = 0,
    implementation: Implementation = "auto",
    rooms: Rooms | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """Kernel attention in O(L): S_t = exp(log_gate_t) S_{t-1} + key_scale_t phi(k_t) v_t^T, o_t = phi(q_t)^T S_t / den.

    Without `feature_map`, q and k are features already; with it, phi is applied block by block inside, so the
    features of the whole sequence never exist. Causal with L != S is aligned at the top left: query t sees keys
    <= t, later queries see all keys. Not causal: every query reads the state after the last key. RFA-Gate is
    log_gate = log g, key_scale = 1 - g. A log gate of -inf is a closed gate: nothing older is left.

    `documents` are the positions at which documents start; each attends to itself. The state in is that of the tokens
    before the first start, the state out that of the last document.

    With a `prefix` the first so many tokens see each other fully, as if not causal, and the rest is causal (prefix-LM).

    `implementation` names what computes it, see `implementation.choose`: "native" C kernels for a CPU, which "auto"
    takes where there is a compiler; "triton" those for a GPU, which "auto" takes only once they have run on one; this
    streaming form elsewhere.

    Outputs and gradients may be written to `rooms`, or not: see `PartedSequence`.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], log_gate and key_scale [B, H, S] -> o [B, H, L, V] in v's
        dtype and the state after the last key (float32, or float64 for float64 inputs).
    Raises: ShapeError when shapes do not fit together; InputError for a prefix where attention is not causal, or of
        packed documents; ConfigError for an implementation that cannot take this call.
    Reference: Random Feature Attention, Eq. 5 to 7, Algorithms 1 and 2.
    """
    check_shapes(q_BHLK, k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS)
    _check_parts(q_BHLK.shape[2], k_BHSK.shape[2], prefix, causal, documents or ())
    choice = choose(
        implementation,
        q_BHLK,
        k_BHSK,
        v_BHSV,
        feature_map=feature_map,
        causal=causal,
        state=state,
        prefix=prefix,
        documents=bool(documents),
    )
    if prefix:
        return prefix_then_causal(
            partial(linear_attention, feature_map=feature_map, denominator=denominator, implementation=implementation),
            q_BHLK,
            k_BHSK,
            v_BHSV,
            log_gate_BHS=log_gate_BHS,
            key_scale_BHS=key_scale_BHS,
            state=state,
            queries=prefix,
            keys=prefix,
        )
    policy = Denominator() if denominator is None else denominator
    sequence = (q_BHLK, k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS)
    if choice.implementation == "streaming":
        return _stream(sequence, feature_map, causal, state, policy, documents or (), implementation)
    return _by_kernels(choice, sequence, feature_map, causal, state, policy, documents or (), rooms)


def _by_kernels(
    choice: Choice,
    sequence: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    feature_map: FeatureMap | None,
    causal: bool,
    state: LinearState | None,
    policy: Denominator,
    documents: tuple[int, ...],
    rooms: Rooms | None,
) -> tuple[torch.Tensor, LinearState]:
    streaming = partial(linear_attention, implementation="streaming")
    if choice.implementation == "native":
        return natively(
            sequence,
            feature_map,
            causal,
            state,
            policy,
            documents,
            attend=streaming,
            read=partial(streaming, causal=False),
            absorb=partial(absorb_keys, implementation="streaming"),
            rooms=rooms,
        )
    # Not at the top: a machine without a GPU need not have triton.
    if not causal:
        from dist_attn.ops.linear_attention.triton_full import triton_full_attention

        return triton_full_attention(*sequence, feature_map=feature_map, state=state, denominator=policy)
    from dist_attn.ops.linear_attention.triton import triton_linear_attention

    return triton_linear_attention(
        *sequence,
        feature_map=feature_map,
        state=state,
        denominator=policy,
        documents=documents,
        differentiable=streaming,
    )


def _check_parts(queries: int, keys: int, prefix: int, causal: bool, documents: tuple[int, ...]) -> None:
    check_prefix(prefix, causal=causal, documents=bool(documents))
    if documents:
        check_documents(documents, queries, keys)


def _stream(
    sequence: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    feature_map: FeatureMap | None,
    causal: bool,
    state: LinearState | None,
    policy: Denominator,
    documents: tuple[int, ...],
    implementation: Implementation,
) -> tuple[torch.Tensor, LinearState]:
    q_BHLK, k_BHSK, v_BHSV, *_ = sequence
    starts_11L = None
    if documents:
        if not causal:
            return _each_document(sequence, feature_map, state, policy, documents, implementation)
        starts_11L = start_flags(documents, k_BHSK.shape[2], k_BHSK.device)[None, None]
    dtype = state_dtype(q_BHLK, k_BHSK, v_BHSV, state=state)
    carry, block, reset_BH = prepare(k_BHSK, v_BHSV, feature_map, state, policy, dtype)
    num_queries, num_keys = q_BHLK.shape[2], k_BHSK.shape[2]
    shared = min(num_queries, num_keys) if causal else 0

    outputs: list[torch.Tensor] = []
    if shared:
        given = tuple(_head(t, shared) for t in (*sequence, starts_11L))
        out, carry = _run(_Attend(block), given, carry, block, v_BHSV.dtype)
        outputs.append(out)
    if shared < num_keys:
        rest = (*(_tail(t, shared) for t in sequence[1:]), None)
        _, carry = _run(_Absorb(block), rest, carry, block, v_BHSV.dtype)
    if shared < num_queries or not outputs:
        outputs.append(_read(q_BHLK[:, :, shared:], carry, block, v_BHSV.dtype))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out, to_state(carry, torch.ones_like(reset_BH) if documents else reset_BH)


def absorb_keys(
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    state: LinearState | None = None,
    dtype: torch.dtype = torch.float32,
    documents: tuple[int, ...] | None = None,
    implementation: Implementation = "auto",
) -> LinearState:
    """The state that these keys leave behind, without any output: what a rank sends to the ranks after it.

    The state has at least the precision `dtype`. With `documents` it is that of the last one. `implementation` is as
    for `linear_attention`.

    Shapes: as `linear_attention`.
    Raises: ConfigError for an implementation that cannot take this call.
    """
    check_shapes(k_BHSK, k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS)
    dtype = state_dtype(k_BHSK, v_BHSV, state=state, at_least=dtype)
    if documents:
        check_documents(documents, k_BHSK.shape[2])
        k_BHSK, v_BHSV = k_BHSK[:, :, documents[-1] :], v_BHSV[:, :, documents[-1] :]
        log_gate_BHS, key_scale_BHS = (_tail(t, documents[-1]) for t in (log_gate_BHS, key_scale_BHS))
        state = None
    choice = choose(implementation, k_BHSK, k_BHSK, v_BHSV, feature_map=feature_map, state=state, sums=dtype)
    if choice.implementation == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn.ops.linear_attention.triton_full import triton_absorb_keys

        after = triton_absorb_keys(k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS, feature_map=feature_map, state=state)
        return replace(after, reset_BH=torch.ones_like(after.reset_BH)) if documents else after
    if choice.implementation == "native":
        absorb = partial(absorb_keys, implementation="streaming")
        after = natively_absorbed(k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS, feature_map, state, absorb=absorb)
        return replace(after, reset_BH=torch.ones_like(after.reset_BH)) if documents else after
    carry, block, reset_BH = prepare(k_BHSK, v_BHSV, feature_map, state, Denominator(), dtype)
    # No keys, no blocks, but the same graph: an empty rank must take part in the backward exchange too.
    _, carry = _run(_Absorb(block), (k_BHSK, v_BHSV, log_gate_BHS, key_scale_BHS, None), carry, block, v_BHSV.dtype)
    return to_state(carry, torch.ones_like(reset_BH) if documents else reset_BH)


def check_shapes(
    q_BHLK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    log_gate_BHS: torch.Tensor | None,
    key_scale_BHS: torch.Tensor | None,
) -> None:
    """Raises ShapeError in words when the inputs of linear attention do not fit together."""
    if not (q_BHLK.dim() == k_BHSK.dim() == v_BHSV.dim() == 4):
        raise ShapeError(
            f"q {tuple(q_BHLK.shape)}, k {tuple(k_BHSK.shape)}, v {tuple(v_BHSV.shape)}: all three need four "
            "dimensions [batch, heads, length, size]"
        )
    if q_BHLK.shape[:2] != k_BHSK.shape[:2] or k_BHSK.shape[:3] != v_BHSV.shape[:3]:
        raise ShapeError(
            f"q {tuple(q_BHLK.shape)}, k {tuple(k_BHSK.shape)}, v {tuple(v_BHSV.shape)}: batch and heads must be equal "
            "in all three, the length equal in k and v"
        )
    if q_BHLK.shape[3] != k_BHSK.shape[3]:
        raise ShapeError(f"q has size {q_BHLK.shape[3]} per head and k {k_BHSK.shape[3]}; they must be equal")
    for name, tensor in (("log_gate", log_gate_BHS), ("key_scale", key_scale_BHS)):
        if tensor is not None and tensor.shape != k_BHSK.shape[:3]:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; needed is [batch, heads, keys] = {tuple(k_BHSK.shape[:3])}"
            )


def _each_document(
    sequence: _Optional,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    policy: Denominator,
    documents: tuple[int, ...],
    implementation: Implementation,
) -> tuple[torch.Tensor, LinearState]:
    """Full attention inside every document: long ones by their state, short ones several at a time."""
    q, k, v, log_gate, key_scale = sequence
    assert q is not None and k is not None and v is not None
    dtype, first = state_dtype(q, k, v, state=state), documents[0]
    block = AttentionBlock(feature_map, policy, CHUNK_TOKENS, dtype)
    starts_11L = start_flags(documents, q.shape[2], q.device)[None, None]
    later = tuple(start - first for start in documents)
    runs = [
        (a + first, b + first, groups) for a, b, groups in document_runs(later, q.shape[2] - first, TOGETHER_TOKENS)
    ]
    if first:
        runs.insert(0, (0, first, ()))
    outputs: list[torch.Tensor] = []
    after = None
    parts = split_tokens((*sequence, starts_11L), [(a, b) for a, b, _ in runs])
    for part, (start, _, groups) in zip(parts, runs, strict=True):
        if groups:
            outputs.append(attend_together(block, groups, part, v.dtype))
            after = None
            continue
        part_q, part_k, part_v, part_gate, part_scale, _ = part
        assert part_q is not None and part_k is not None and part_v is not None
        out, after = linear_attention(
            part_q,
            part_k,
            part_v,
            feature_map=feature_map,
            log_gate_BHS=part_gate,
            key_scale_BHS=part_scale,
            causal=False,
            state=state if start < first else None,
            denominator=policy,
            implementation=implementation,
        )
        outputs.append(out)
    if after is None:
        after = absorb_keys(
            k,
            v,
            feature_map=feature_map,
            log_gate_BHS=log_gate,
            key_scale_BHS=key_scale,
            dtype=dtype,
            documents=documents,
            implementation=implementation,
        )
    return torch.cat(outputs, dim=2), replace(after, reset_BH=torch.ones_like(after.reset_BH))


@dataclass(frozen=True)
class _Attend:
    block: AttentionBlock
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q, k, v, log_gate, key_scale, starts = sequence
        assert q is not None and k is not None and v is not None
        return self.block.attend(q, k, v, log_gate, key_scale, starts, Carry(*carry), parameters)

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return _absorb(self.block, sequence[1:], carry, parameters)


@dataclass(frozen=True)
class _Absorb:
    block: AttentionBlock
    has_output = False

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        return None, self.advance(sequence, carry, parameters)

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return _absorb(self.block, sequence, carry, parameters)


@dataclass(frozen=True)
class _Read:
    block: AttentionBlock
    num_map_tensors: int
    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        # Every block reads the same state, so it is a parameter here: its gradients add up over the blocks.
        state = Carry(*parameters[self.num_map_tensors :])
        (q,) = sequence
        assert q is not None
        return self.block.read(q, state, parameters[: self.num_map_tensors]), ()

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return ()


def _absorb(block: AttentionBlock, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> Carry:
    k, v, log_gate, key_scale, starts = sequence
    assert k is not None and v is not None
    return block.absorb(k, v, log_gate, key_scale, starts, Carry(*carry), parameters)


def state_dtype(*inputs: torch.Tensor, state: LinearState | None, at_least: torch.dtype = torch.float32) -> torch.dtype:
    """The precision of sums over these inputs: the widest of all, float32 at least."""
    states = () if state is None else (state.s_BHMV,)
    return reduce(torch.promote_types, (t.dtype for t in (*inputs, *states)), at_least)


def prepare(
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    policy: Denominator,
    dtype: torch.dtype,
) -> tuple[Carry, AttentionBlock, torch.Tensor]:
    block = AttentionBlock(feature_map, policy, CHUNK_TOKENS, dtype)
    features = k_BHSK.shape[3]
    if feature_map is not None:
        with torch.no_grad():
            features = feature_map(k_BHSK[:1, :, :0]).shape[-1]
    (batch, heads), values = v_BHSV.shape[:2], v_BHSV.shape[3]
    if state is None:
        state = LinearState.identity(batch, heads, features, values, dtype=dtype, device=v_BHSV.device)
    state.check(batch, heads, features, values)
    sz_BHMW = torch.cat([state.s_BHMV, state.z_BHM[..., None]], dim=-1).to(dtype)
    return Carry(sz_BHMW, state.mass_BH.to(dtype), state.log_decay_BH.to(dtype)), block, state.reset_BH


def _run(
    body: _Attend | _Absorb, sequence: _Optional, carry: Carry, block: AttentionBlock, dtype: torch.dtype
) -> tuple[torch.Tensor, Carry]:
    values = sequence[2] if body.has_output else sequence[1]
    assert values is not None  # q, k and v are always there
    parameters = () if block.feature_map is None else block.feature_map.tensors()
    out, after = scan(
        body,
        block_ranges(values.shape),
        sequence,
        carry,
        parameters,
        output_shape=tuple(values.shape) if body.has_output else (0,),
        output_dtype=dtype,
    )
    return out, Carry(*after)


def _read(q_BHLK: torch.Tensor, carry: Carry, block: AttentionBlock, dtype: torch.dtype) -> torch.Tensor:
    parameters = () if block.feature_map is None else block.feature_map.tensors()
    out, _ = scan(
        _Read(block, len(parameters)),
        block_ranges(q_BHLK.shape),
        (q_BHLK,),
        (),
        (*parameters, *carry),
        output_shape=(*q_BHLK.shape[:3], carry.sz_BHMW.shape[3] - 1),
        output_dtype=dtype,
    )
    return out


def block_ranges(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Token ranges of the blocks of a [B, H, L, ...] tensor: cache-sized ones, the remaining whole chunks, the tail.

    No token is padded or dropped.
    """
    batch, heads, tokens = shape[:3]
    chunks = max(1, min(8, BLOCK_GROUP_TOKENS // (CHUNK_TOKENS * max(1, batch * heads))))
    whole = tokens - tokens % CHUNK_TOKENS
    edges = [*range(0, whole, chunks * CHUNK_TOKENS), whole, tokens]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def _head(tensor: torch.Tensor | None, length: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, :, :length]


def _tail(tensor: torch.Tensor | None, start: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, :, start:]


def to_state(carry: Carry, reset_BH: torch.Tensor) -> LinearState:
    sz_BHMW, mass_BH, log_decay_BH = carry
    return LinearState(sz_BHMW[..., :-1], sz_BHMW[..., -1], mass_BH, log_decay_BH, reset_BH)
