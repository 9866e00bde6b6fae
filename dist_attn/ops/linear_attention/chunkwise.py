"""Linear attention chunk by chunk, each from its in-line state: every product has the same shape wherever a cut is.

How a matrix product rounds depends on the sizes of its matrices. Here these are those of one chunk, so the result has
the same bits in one call and in several calls that are cut between chunks and pass the state on.
"""

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.implementation import Implementation
from dist_attn.ops.linear_attention.streaming import CHUNK_TOKENS, absorb_keys, linear_attention
from dist_attn.ops.state import LinearState

__all__ = ["absorb_by_chunks", "attend_by_chunks", "chunk_ranges", "read_by_chunks"]


def attend_by_chunks(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHL: torch.Tensor | None = None,
    key_scale_BHL: torch.Tensor | None = None,
    denominator: Denominator | None = None,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, LinearState]:
    """Causal `linear_attention` from `state`, and the state after the last key.

    The backward pass keeps the state before every chunk.
    """
    outputs = [_no_outputs(q_BHLK, v_BHLV)]
    for start, stop in chunk_ranges(k_BHLK.shape[2]):
        out, state = linear_attention(
            _chunk(q_BHLK, start, stop),
            _chunk(k_BHLK, start, stop),
            _chunk(v_BHLV, start, stop),
            feature_map=feature_map,
            log_gate_BHS=None if log_gate_BHL is None else _chunk(log_gate_BHL, start, stop),
            key_scale_BHS=None if key_scale_BHL is None else _chunk(key_scale_BHL, start, stop),
            state=state,
            denominator=denominator,
            implementation=implementation,
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2), state


def absorb_by_chunks(
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> LinearState:
    """The state after the last key, with the bits of `attend_by_chunks`."""
    for start, stop in chunk_ranges(k_BHSK.shape[2]):
        state = absorb_keys(
            _chunk(k_BHSK, start, stop),
            _chunk(v_BHSV, start, stop),
            feature_map=feature_map,
            log_gate_BHS=None if log_gate_BHS is None else _chunk(log_gate_BHS, start, stop),
            key_scale_BHS=None if key_scale_BHS is None else _chunk(key_scale_BHS, start, stop),
            state=state,
            implementation=implementation,
        )
    return state


def read_by_chunks(
    q_BHLK: torch.Tensor,
    v_BHSV: torch.Tensor,
    state: LinearState,
    *,
    feature_map: FeatureMap | None = None,
    denominator: Denominator | None = None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Attention of queries that all see exactly `state`; of `v` only the sizes and the type count."""
    nothing = q_BHLK[:, :, :0], v_BHSV[:, :, :0]
    outputs = [_no_outputs(q_BHLK, v_BHSV)]
    for start, stop in chunk_ranges(q_BHLK.shape[2]):
        chunk = _chunk(q_BHLK, start, stop)
        out, _ = linear_attention(
            chunk,
            *nothing,
            feature_map=feature_map,
            causal=False,
            state=state,
            denominator=denominator,
            implementation=implementation,
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def chunk_ranges(tokens: int) -> list[tuple[int, int]]:
    """Token ranges of the chunks; the last one may be shorter."""
    return [(start, min(start + CHUNK_TOKENS, tokens)) for start in range(0, tokens, CHUNK_TOKENS)]


def _no_outputs(q_BHLK: torch.Tensor, v_BHSV: torch.Tensor) -> torch.Tensor:
    """The outputs of no tokens, which still depend on q and v: without tokens both get a gradient of no elements."""
    return v_BHSV[:, :, :0] + q_BHLK[:, :, :0].sum(-1, keepdim=True).to(v_BHSV.dtype)


def _chunk(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    # Contiguous: products of strided views may take another path than those of whole tensors.
    return x[:, :, start:stop].contiguous()
