"""Numerators of relative attention in O(L): a window of exact position scores around each query, sums beyond it.

Causal, a query sees a kernel state, the values of its window and one sum of older values; the chunks of a block are
computed together, each with the state, the window and the sum that stand before it.

Where a query sees every key, a chunk sees in one score matrix the sum of everything older, the k - 1 keys before it,
its own, the k - 1 behind it and the sum of everything later. No chunk waits for another: the sums of whole chunks are
added up first, each side from its own end, because the difference of two running sums would lose its digits.

Position scores become the matrices of whole chunks, a column for each key, without an index per score. Row i of a
chunk's matrix is row i - 1 moved on by one key. So each row is written once, as wide as all the moves need, and read
with a row stride that is one element short: a view, whose gradient is a view too.

Shape letters: B batch, H heads, L queries, S keys, K or M features, V values, W = V + 1 (v and a ones column), R rows
of relative positions -k .. k, or -k .. 0; N chunks of C tokens, T tokens of a block or of a window, J columns.

Reference: Scaleformer, Eq. 9 to 11 and Algorithm 2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dist_attn.ops.device import without_autocast
from dist_attn.ops.linear_attention.streaming import block_ranges
from dist_attn.ops.scan import MaybeTensors, OutputOnly, Tensors, scan
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState

CHUNK_TOKENS = 64


class WindowCarry(NamedTuple):
    """The values a causal walk carries: kernel sums (of no features where there are no keys), far values, near ones."""

    sz_BHMW: torch.Tensor
    far_BHW: torch.Tensor
    near_BHTW: torch.Tensor

    @staticmethod
    def of(state: RelativeState, dtype: torch.dtype) -> "WindowCarry":
        """The carry behind this state."""
        return WindowCarry(*(t.to(dtype) for t in (state.sz_BHMW, state.window.far_BHW, state.window.near_BHTW)))


def numerators(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor | None,
    v1_BHLW: torch.Tensor,
    rp_HRK: torch.Tensor,
    *,
    own: bool,
    before: RelativeState | WindowState | None = None,
) -> torch.Tensor:
    """Numerators [B, H, L, W] over the keys up to each query and those in `before`, not yet divided.

    v1 is v with a ones column, so the last column is the denominator; rp has the rows -k .. 0. Without keys only the
    position scores count (then `before` is a window alone). `own`: whether a query sees its own key.
    """
    if isinstance(before, RelativeState):
        carry = WindowCarry.of(before, v1_BHLW.dtype)
    else:
        window = WindowState.of(v1_BHLW[:, :, :0], max(rp_HRK.shape[1] - 2, 0)) if before is None else before
        (batch, heads, _, columns), features = v1_BHLW.shape, 0 if k_BHLK is None else k_BHLK.shape[3]
        carry = WindowCarry(v1_BHLW.new_zeros((batch, heads, features, columns)), window.far_BHW, window.near_BHTW)
    return walk(q_BHLK, k_BHLK, v1_BHLW, rp_HRK, own, carry)[0]


def walk(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor | None,
    v1_BHLW: torch.Tensor,
    rp_HRK: torch.Tensor,
    own: bool,
    carry: WindowCarry,
) -> tuple[torch.Tensor, WindowCarry]:
    """Numerators after `carry`, and the carry behind the last token."""
    num_BHLW, after = scan(
        _WindowPass(own),
        block_ranges(v1_BHLW.shape, v1_BHLW.device),
        (q_BHLK, k_BHLK, v1_BHLW),
        carry,
        (rp_HRK,),
        output_shape=tuple(v1_BHLW.shape),
        output_dtype=v1_BHLW.dtype,
    )
    return num_BHLW, WindowCarry(*after)


def numerators_of_all(
    q_BHLK: torch.Tensor, k_BHSK: torch.Tensor, v1_BHSW: torch.Tensor, rp_HRK: torch.Tensor
) -> torch.Tensor:
    """Numerators [B, H, L, W] over all keys, not yet divided; v1 is v with a ones column, rp has the rows -k .. k."""
    with without_autocast(q_BHLK.device):
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
    with without_autocast(q_BHLK.device):
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
    blocks = [(a // chunk, -(-b // chunk)) for a, b in block_ranges((*shape[:2], chunks * chunk), q_BHLK.device)]
    out_BHNCW, _ = scan(
        OutputOnly(_around),
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
class _WindowPass:
    """One block of the causal pass: numerators [B, H, T, W]; without keys, of the position scores alone.

    `own`: whether a query sees its own key.
    """

    own: bool
    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        q, k, v1 = sequence
        (rp_HRK,) = parameters
        assert q is not None and v1 is not None
        sz_BHMW, far_BHW, near_BHTW = carry
        tokens, width = v1.shape[2], near_BHTW.shape[2]
        # A block has whole chunks, or it is the last one and less than a chunk.
        chunk = CHUNK_TOKENS if tokens % CHUNK_TOKENS == 0 else tokens
        v1_BHNCW = v1.unflatten(2, (-1, chunk))
        scores_BHNCJ = _scores_before((q @ rp_HRK.transpose(-1, -2)).unflatten(2, (-1, chunk)), own=self.own)
        seen_BHJW = torch.cat([near_BHTW, v1], dim=2)
        leaving_BHNW = seen_BHJW[:, :, :tokens].unflatten(2, (-1, chunk)).sum(3)
        far_BHNW, far_BHW = _running(far_BHW, leaving_BHNW)
        window_BHNTW = _windows(seen_BHJW, width, chunk)
        older_BHNJW = torch.cat([far_BHNW[:, :, :, None], window_BHNTW], dim=3)
        num_BHNCW = scores_BHNCJ[..., : 1 + width] @ older_BHNJW
        own_BHNCC = scores_BHNCJ[..., 1 + width :]
        if k is not None:
            q_BHNCK, k_BHNCK = q.unflatten(2, (-1, chunk)), k.unflatten(2, (-1, chunk))
            sz_BHNMW, sz_BHMW = _running(sz_BHMW, k_BHNCK.transpose(-1, -2) @ v1_BHNCW)
            num_BHNCW = num_BHNCW + q_BHNCK @ sz_BHNMW
            own_BHNCC = own_BHNCC + (q_BHNCK @ k_BHNCK.transpose(-1, -2)).tril()
        num_BHNCW = num_BHNCW + own_BHNCC @ v1_BHNCW
        # The copy, so that a state that is kept does not keep the block.
        return num_BHNCW.flatten(2, 3), WindowCarry(sz_BHMW, far_BHW, seen_BHJW[:, :, tokens:].clone())

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        _, k, v1 = sequence
        assert v1 is not None
        sz_BHMW, far_BHW, near_BHTW = carry
        window = WindowState(far_BHW, near_BHTW, 0).combine(WindowState.of(v1, near_BHTW.shape[2]))
        if k is not None:
            sz_BHMW = sz_BHMW + k.transpose(-1, -2) @ v1
        return WindowCarry(sz_BHMW, window.far_BHW, window.near_BHTW)


def _around(sequence: MaybeTensors, parameters: Tensors) -> torch.Tensor:
    """Numerators of a few chunks of queries: sequences are [B, H, N, ...]."""
    q_BHNCK, *values = (t for t in sequence if t is not None)
    rp_HRK, *sums = parameters
    q_BHTK = q_BHNCK.flatten(2, 3)
    positions_BHNCR = (q_BHTK @ rp_HRK.transpose(-1, -2)).unflatten(2, q_BHNCK.shape[2:4])
    num_BHNCW = _scores_on_both_sides(positions_BHNCR) @ torch.cat(values, dim=3)
    for sums_BHKW in sums:
        num_BHNCW = num_BHNCW + (q_BHTK @ sums_BHKW).unflatten(2, q_BHNCK.shape[2:4])
    return num_BHNCW


def _values(v1_BHSW: torch.Tensor, before: WindowState, after: WindowState, chunks: int, chunk: int) -> Tensors:
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


def _running(start: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`start` and the N parts [B, H, N, ...] added up: the sum before each part, and that of all."""
    sums = [start]
    for part in parts.unbind(2):
        sums.append(sums[-1] + part)
    return torch.stack(sums[:-1], dim=2), sums[-1]


def _windows(seen_BHJW: torch.Tensor, width: int, chunk: int) -> torch.Tensor:
    """[B, H, N, T, W]: the T = `width` values before each chunk, of all that the block sees."""
    tokens = seen_BHJW.shape[2] - width
    if width <= chunk:
        chunks_BHNCW: torch.Tensor = seen_BHJW[:, :, :tokens].unflatten(2, (-1, chunk))
        return chunks_BHNCW[:, :, :, :width]
    # Windows that overlap.
    return seen_BHJW[:, :, : tokens + width - chunk].unfold(2, width, chunk).transpose(-1, -2)


def _scores_before(positions_BHNCR: torch.Tensor, *, own: bool) -> torch.Tensor:
    """The scores of every query: all older keys as one, the k - 1 before its chunk, its chunk; 0 behind the query.

    Shapes: positions of the rows -k .. 0, R = k + 1 -> [B, H, N, C, 1 + max(k - 1, 0) + C]. `own`: whether a query sees
        its own key.
    """
    *_, chunk, rows = positions_BHNCR.shape
    seen = positions_BHNCR[..., min(rows - 1, 1) : rows - 1 + own]
    unseen = positions_BHNCR.new_zeros((1,) * 5)
    return _moved_on(positions_BHNCR[..., :1], seen, unseen, chunk + 1 - own)


def _scores_on_both_sides(positions_BHNCR: torch.Tensor) -> torch.Tensor:
    """The scores of every query: all older keys as one, k - 1 keys, the chunk's own, k - 1 more, all later ones as one.

    Shapes: positions of the rows -k .. k, k >= 1, R = 2 k + 1 -> [B, H, N, C, C + 2 k].
    """
    *_, chunk, _ = positions_BHNCR.shape
    return _moved_on(positions_BHNCR[..., :1], positions_BHNCR[..., 1:-1], positions_BHNCR[..., -1:], chunk + 1)


def _moved_on(before: torch.Tensor, near: torch.Tensor, after: torch.Tensor, behind: int) -> torch.Tensor:
    """[B, H, N, C, J]: row i is `before` i + 1 times, then `near`, then `after`, which is written `behind` times."""
    *lead, chunk, _ = near.shape
    parts = [before.expand(*lead, chunk, chunk), near, after.expand(*lead, chunk, behind)]
    rows_BHNCX = torch.cat(parts, dim=-1)
    width = rows_BHNCX.shape[-1]
    moved_BHNCX: torch.Tensor = rows_BHNCX.flatten(3)[..., chunk - 1 : chunk * width - 1].unflatten(
        3, (chunk, width - 1)
    )
    return moved_BHNCX[..., : width - chunk]
