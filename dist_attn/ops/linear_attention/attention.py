"""Linear attention: what computes a call; calls of a prefix, chunk by chunk, of documents that see all of themselves.

Shape letters: B batch, H heads, L queries, S keys, K head size, M features, V values, W = V + 1 (v and a ones column),
T tokens of a few documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.documents import document_runs, same_document, split_tokens, start_flags
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import AttentionBlock, BlockTokens, bounded
from dist_attn.ops.linear_attention.call import DEFAULT_DENOMINATOR, LinearCall, prefix_then_causal
from dist_attn.ops.linear_attention.implementation import choose, choose_attention
from dist_attn.ops.linear_attention.native import native_absorb_keys, native_linear_attention
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS, stream_absorb, stream_attention
from dist_attn.ops.scan import MaybeTensors, OutputOnly, Tensors, scan
from dist_attn.ops.sequence_call import Implementation, local_form
from dist_attn.ops.state import LinearState

# Up to this many tokens of whole documents attend by one masked product where attention is not causal. Up to about
# 2 M V / (M + V) tokens that takes fewer multiplications than a state for each document.
TOGETHER_TOKENS = 128


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
    takes where there is a compiler; "triton" those for a GPU, which "auto" takes where a trial comes out right; "fla"
    flash-linear-attention's for causal calls, which "auto" takes where they were faster; the streaming form elsewhere.

    Shapes: q [B, H, L, K], k [B, H, S, K], v [B, H, S, V], log_gate and key_scale [B, H, S] -> o [B, H, L, V] in v's
        dtype and the state after the last key (float32, or float64 for float64 inputs).
    Raises: ShapeError when shapes do not fit together; InputError for a prefix where attention is not causal, or of
        packed documents; ConfigError for an implementation that cannot take this call.
    Reference: Random Feature Attention, Eq. 5 to 7, Algorithms 1 and 2.
    """
    call = LinearCall(
        q_BHLK,
        k_BHSK,
        v_BHSV,
        log_gate_BHS,
        key_scale_BHS,
        feature_map=feature_map,
        causal=causal,
        state=state,
        denominator=DEFAULT_DENOMINATOR if denominator is None else denominator,
        documents=documents or (),
        prefix=prefix,
        implementation=implementation,
    )
    return attend(call)


@local_form(LinearCall)
def attend(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of a call. Outputs and gradients may be written to its buffers, or not: see `SplitSequence`.

    Raises: as `linear_attention`.
    """
    call.check()
    choice = choose_attention(call).implementation
    if call.prefix:
        return prefix_then_causal(attend, call, call.prefix, call.prefix)
    if choice == "native":
        return native_linear_attention(call)
    if choice == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        if not call.causal:
            from dist_attn.ops.linear_attention.triton_full import triton_full_attention

            return triton_full_attention(call)
        from dist_attn.ops.linear_attention.triton import triton_linear_attention

        return triton_linear_attention(call)
    if choice == "fla":
        # Likewise.
        from dist_attn.ops.linear_attention.fla import fla_linear_attention

        return fla_linear_attention(call)
    if call.documents and not call.causal:
        return _attend_within_documents(call)
    return stream_attention(call)


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
    Raises: ShapeError when shapes do not fit together; ConfigError for an implementation that cannot take this call.
    """
    call = LinearCall(
        k_BHSK,
        k_BHSK,
        v_BHSV,
        log_gate_BHS,
        key_scale_BHS,
        feature_map=feature_map,
        state=state,
        documents=documents or (),
        implementation=implementation,
    )
    return absorb(call, dtype)


def absorb(call: LinearCall, dtype: torch.dtype = torch.float32) -> LinearState:
    """`absorb_keys` of a call, whose queries count for nothing.

    Raises: as `absorb_keys`.
    """
    call = replace(call.of_keys(), prefix=0)
    call.check()
    dtype, documents = call.sums_dtype(dtype), call.documents
    if documents:
        call = replace(call.tokens(documents[-1]), documents=(), state=None)
    choice = choose(call, sums=dtype, form="full").implementation
    if choice == "triton":
        # Not at the top: a machine without a GPU need not have triton.
        from dist_attn.ops.linear_attention.triton_full import triton_absorb_keys

        after = triton_absorb_keys(call)
    else:
        after = native_absorb_keys(call) if choice == "native" else stream_absorb(call, dtype)
    return replace(after, reset_BH=torch.ones_like(after.reset_BH)) if documents else after


def attend_by_chunks(call: LinearCall, state: LinearState) -> tuple[torch.Tensor, LinearState]:
    """Causal attention from `state` chunk by chunk: every product has the same shape wherever a sequence is cut.

    How a matrix product rounds depends on the sizes of its matrices. Here these are those of one chunk, so the result
    has the same bits in one call and in several calls that are cut between chunks and pass the state on. The backward
    pass keeps the state before every chunk.

    Shapes: as `linear_attention` with as many queries as keys; the state is that after the last key.
    """
    outputs = [_no_outputs(call)]
    for chunk in _chunks(call):
        out, state = attend(replace(chunk, state=state))
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def absorb_by_chunks(call: LinearCall, state: LinearState) -> LinearState:
    """The state after the last key, with the bits of `attend_by_chunks`."""
    for chunk in _chunks(call.of_keys()):
        state = absorb(replace(chunk, state=state))
    return state


def read_by_chunks(call: LinearCall, state: LinearState) -> torch.Tensor:
    """Attention of queries [B, H, L, K] that all see exactly `state`; of keys and values only the types count."""
    reads, outputs = call.reading(state), [_no_outputs(call)]
    for start, stop in chunk_ranges(call.queries):
        outputs.append(attend(reads.part(slice(start, stop), slice(0)).contiguous())[0])
    return torch.cat(outputs, dim=2)


def chunk_ranges(tokens: int) -> list[tuple[int, int]]:
    """Token ranges of the chunks; the last one may be shorter."""
    return [(start, min(start + CHUNK_TOKENS, tokens)) for start in range(0, tokens, CHUNK_TOKENS)]


def _attend_within_documents(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """Full attention inside every document: long ones by their state, short ones several at a time."""
    dtype, first = call.sums_dtype(), call.documents[0]
    block = AttentionBlock(call.feature_map, call.denominator, CHUNK_TOKENS, dtype)
    starts_11L = start_flags(call.documents, call.queries, call.q_BHLK.device)[None, None]
    later = tuple(start - first for start in call.documents)
    runs = [
        (a + first, b + first, groups) for a, b, groups in document_runs(later, call.queries - first, TOGETHER_TOKENS)
    ]
    if first:
        runs.insert(0, (0, first, ()))
    outputs: list[torch.Tensor] = []
    after = None
    parts = split_tokens((*call.sequence, starts_11L), [(a, b) for a, b, _ in runs])
    for part, (start, _, groups) in zip(parts, runs, strict=True):
        if groups:
            outputs.append(_attend_together(block, groups, part, call.v_BHSV.dtype))
            after = None
            continue
        q, k, v, log_gate, key_scale, _ = part
        assert q is not None and k is not None and v is not None
        alone = call.with_sequence(q, k, v, log_gate, key_scale)
        alone = replace(alone, state=call.state if start < first else None, documents=(), buffers=None)
        out, after = attend(alone)
        outputs.append(out)
    if after is None:
        after = absorb(replace(call, state=None), dtype)
    return torch.cat(outputs, dim=2), replace(after, reset_BH=torch.ones_like(after.reset_BH))


def _attend_together(
    block: AttentionBlock, groups: Sequence[tuple[int, int]], sequence: MaybeTensors, output_dtype: torch.dtype
) -> torch.Tensor:
    """Outputs [B, H, L, V] of queries that see all keys of their own document and none of another.

    Several whole documents at a time, by one masked product; `groups` are ranges of whole documents that tile L.

    Cost: O(T) per token for groups of T tokens; memory flat in L.
    """

    def together(sequence: MaybeTensors, parameters: Tensors) -> torch.Tensor:
        q, k, v, log_gate, key_scale, starts = BlockTokens.of(sequence)
        assert q is not None and starts is not None
        dtype = block.dtype
        same_TT = same_document(starts[0, 0])
        weight_BHT = torch.ones_like(v[..., 0], dtype=dtype) if key_scale is None else key_scale.to(dtype)
        if log_gate is not None:
            # Every query reads the state after its document's last key: key i is left with all gates after it.
            weight_BHT = weight_BHT * (bounded(log_gate, dtype) @ same_TT.tril(-1).to(dtype)).exp()
        v1_BHTW = F.pad(v.to(dtype), (0, 1), value=1.0) * weight_BHT[..., None]
        phi_q, phi_k = block.features(q, parameters), block.features(k, parameters)
        pairs_BHTT = (phi_q @ phi_k.transpose(-1, -2)).masked_fill(~same_TT, 0.0)
        num_BHTW = pairs_BHTT @ v1_BHTW
        mass_BHT = weight_BHT @ same_TT.to(dtype)
        return block.denominator.divide(num_BHTW[..., :-1], num_BHTW[..., -1], mass_BHT)

    parameters = () if block.feature_map is None else block.feature_map.tensors()
    shape = tuple(BlockTokens.of(sequence).v_BHTV.shape)
    body = OutputOnly(together)
    return scan(body, groups, sequence, (), parameters, output_shape=shape, output_dtype=output_dtype)[0]


def _chunks(call: LinearCall) -> Iterator[LinearCall]:
    return (call.tokens(start, stop).contiguous() for start, stop in chunk_ranges(call.keys))


def _no_outputs(call: LinearCall) -> torch.Tensor:
    """The outputs of no tokens, which still depend on q and v: without tokens both get a gradient of no elements."""
    v = call.v_BHSV
    return v[:, :, :0] + call.q_BHLK[:, :, :0].sum(-1, keepdim=True).to(v.dtype)
