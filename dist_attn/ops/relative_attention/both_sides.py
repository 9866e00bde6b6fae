"""Numerators of queries that see every key: chunks of queries against the keys around them, all others as two sums.

A chunk sees in one score matrix the sum of everything older, the k - 1 keys before it, its own, the k - 1 behind it and
the sum of everything later. No chunk waits for another: the sums of whole chunks are added up first, each side from
its own end, because the difference of two running sums would lose its digits.

Reference: Scaleformer, Eq. 9 to 11 and Algorithm 2.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dist_attn.ops.linear_attention.streaming import block_ranges
from dist_attn.ops.relative_attention.causal import numerators
from dist_attn.ops.relative_attention.chunk_scores import CHUNK_TOKENS, scores_on_both_sides
from dist_attn.ops.relative_attention.state import WindowState
from dist_attn.ops.scan import scan

__all__ = ["numerators_around", "numerators_of_all"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


def numerators_of_all(
    q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v1_BHSW: torch.Tensor, rp_HRK: torch.Tensor
) -> torch.Tensor:
    """Numerators [B, H, L, W] over all keys, not yet divided; v1 is v with a ones column, rp has the rows -k .. k."""
    with torch.autocast(q_BHLK.device.type, enabled=False):
        sums_BHKW = k_BHSK.transpose(-1, -2) @ v1_BHSW
    return numerators_around(q_BHLK, v1_BHSW, rp_HRK, sums_BHKW)


def numerators_around(
    q_BHLK: torch.Tensor,
    v1_BHSW: torch.Tensor,
    rp_HRK: torch.Tensor,
    sums_BHKW: torch.Tensor | None = None,
    before: WindowState | None = None,
    after: WindowState | None = None,
) -> torch.Tensor:
    """Numerators [B, H, L, W] of the position scores, and of the kernel scores whose keys' state is `sums`.

    The first query and the first value of v1 stand at the same place. `before` is the window of values before these,
    `after` that of the ones behind them, mirrored; then v1 has one value for each query.
    Memory: besides inputs and output a copy of v1 and, where they are no whole chunks, of q; backward about three
    times v1 more.
    """
    queries, reach = q_BHLK.shape[2], rp_HRK.shape[1] // 2
    nothing = WindowState.of(v1_BHSW[:, :, :0], max(reach - 1, 0))
    before, after = before or nothing, after or nothing
    chunk = min(CHUNK_TOKENS, max(queries, reach - 1, 1))
    with torch.autocast(q_BHLK.device.type, enabled=False):
        if reach - 1 > chunk:
            return _two_walks(q_BHLK, v1_BHSW, rp_HRK, sums_BHKW, before, after)
        if reach == 0:
            # One score for all keys: the same as three rows that are equal.
            rp_HRK = rp_HRK.expand(-1, 3, -1)
        chunks = -(-queries // chunk)
        missing = chunks * chunk - queries
        q_BHNCK = (F.pad(q_BHLK, (0, 0, 0, missing)) if missing else q_BHLK).unflatten(2, (chunks, chunk))
        values = _values(v1_BHSW, before, after, chunks, chunk)
    shape = (*q_BHNCK.shape[:4], v1_BHSW.shape[3])
    blocks = [(a // chunk, -(-b // chunk)) for a, b in block_ranges((*shape[:2], chunks * chunk))]
    out_BHNCW, _ = scan(
        _Around(),
        blocks,
        (q_BHNCK, *values),
        (),
        (rp_HRK, *(() if sums_BHKW is None else (sums_BHKW,))),
        output_shape=shape,
        output_dtype=v1_BHSW.dtype,
    )
    num_BHLW: torch.Tensor = out_BHNCW.flatten(2, 3)[:, :, :queries]
    return num_BHLW


@dataclass(frozen=True)
class _Around:
    """A few chunks of queries: sequences are [B, H, N, ...], nothing is carried."""

    has_output = True

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        q_BHNCK, *values = (t for t in sequence if t is not None)
        rp_HRK, *sums = parameters
        q_BHTK = q_BHNCK.flatten(2, 3)
        positions_BHNCR = (q_BHTK @ rp_HRK.transpose(-1, -2)).unflatten(2, q_BHNCK.shape[2:4])
        num_BHNCW = scores_on_both_sides(positions_BHNCR) @ torch.cat(values, dim=3)
        for sums_BHKW in sums:
            num_BHNCW = num_BHNCW + (q_BHTK @ sums_BHKW).unflatten(2, q_BHNCK.shape[2:4])
        return num_BHNCW, ()

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        return ()


def _values(v1_BHSW: torch.Tensor, before: WindowState, after: WindowState, chunks: int, chunk: int) -> _Tensors:
    """[B, H, N, J, W] five times: the sum of all older, the k - 1 before a chunk, its own, k - 1 behind, all later."""
    width = before.near_BHTW.shape[2]
    tokens = chunks * chunk
    # Values farther behind the last query are in no window. Where there are such, nothing comes `after` them.
    held, beyond = v1_BHSW[:, :, : tokens + width], v1_BHSW[:, :, tokens + width :]
    parts = [F.pad(before.near_BHTW, (0, 0, chunk - width, 0)), held, after.near_BHTW.flip(2)]
    padded = torch.cat(parts, dim=2)
    # Filled up to whole chunks, one more on either side; fewer than none takes away.
    padded = F.pad(padded, (0, 0, 0, tokens + 2 * chunk - padded.shape[2]))
    own = padded.unflatten(2, (-1, chunk))
    leaving, coming = (_chunk_sums(padded[:, :, at : at + tokens], chunk) for at in (chunk - width, chunk + width))
    older = torch.cat([before.far_BHW[:, :, None], leaving], dim=2).cumsum(2)
    last_BHW = after.far_BHW + beyond.sum(2)
    later = torch.cat([last_BHW[:, :, None], coming.flip(2)], dim=2).cumsum(2).flip(2)
    return (
        older[:, :, :-1, None],
        own[:, :, :-2, chunk - width :],
        own[:, :, 1:-1],
        own[:, :, 2:, :width],
        later[:, :, 1:, None],
    )


def _chunk_sums(v1_BHTW: torch.Tensor, chunk: int) -> torch.Tensor:
    """[B, H, N, W]: the values of each chunk added up."""
    sums_BHNW: torch.Tensor = v1_BHTW.unflatten(2, (-1, chunk)).sum(3)
    return sums_BHNW


def _two_walks(
    q_BHLK: torch.Tensor,
    v1_BHSW: torch.Tensor,
    rp_HRK: torch.Tensor,
    sums_BHKW: torch.Tensor | None,
    before: WindowState,
    after: WindowState,
) -> torch.Tensor:
    """`numerators_around` where the window is longer than a chunk: the causal walk, and again, mirrored."""
    queries, reach = q_BHLK.shape[2], rp_HRK.shape[1] // 2
    length = max(queries, v1_BHSW.shape[2])
    q, v1 = (F.pad(t, (0, 0, 0, length - t.shape[2])) for t in (q_BHLK, v1_BHSW))
    num = numerators(q, None, v1, rp_HRK[:, : reach + 1], own=True, before=before)
    num = num + numerators(q.flip(2), None, v1.flip(2), rp_HRK[:, reach:].flip(1), own=False, before=after).flip(2)
    num = num[:, :, :queries]
    return num if sums_BHKW is None else num + q_BHLK @ sums_BHKW
