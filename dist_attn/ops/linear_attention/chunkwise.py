"""Linear attention chunk by chunk, each from its in-line state: every product has the same shape wherever a cut is.

How a matrix product rounds depends on the sizes of its matrices. Here these are those of one chunk, so the result has
the same bits in one call and in several calls that are cut between chunks and pass the state on.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dist_attn.ops.linear_attention.attention import absorb, attend
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS
from dist_attn.ops.state import LinearState


def attend_by_chunks(call: LinearCall, state: LinearState) -> tuple[torch.Tensor, LinearState]:
    """Causal attention from `state`, and the state after the last key.

    The backward pass keeps the state before every chunk.

    Shapes: as `linear_attention` with as many queries as keys.
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


def _chunks(call: LinearCall) -> Iterator[LinearCall]:
    return (call.tokens(start, stop).contiguous() for start, stop in chunk_ranges(call.keys))


def _no_outputs(call: LinearCall) -> torch.Tensor:
    """The outputs of no tokens, which still depend on q and v: without tokens both get a gradient of no elements."""
    v = call.v_BHSV
    return v[:, :, :0] + call.q_BHLK[:, :, :0].sum(-1, keepdim=True).to(v.dtype)
