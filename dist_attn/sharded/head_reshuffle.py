"""Exact softmax attention across ranks: every rank takes all tokens of its share of the heads, and gives them back.

q, k and v travel in one all-to-all, the outputs in another. Heads are attended one after the other, so the memory above
inputs and outputs is that of one head. Which rank takes which share is chosen so that least travels.

The key heads lie on a line that is cut into P equal parts. A cut inside a head divides its queries, so that any number
of heads over any number of ranks is even work: fewer heads than ranks, and numbers that do not divide. When causal,
the queries of such a head are folded first, query t with query L - 1 - t, since late queries see more keys than early
ones.

Reference: A Unified View of Long-Sequence Models, Sec. 10.4 (all-to-all head reshuffle); Kabic et al., COSTA.

Shape letters: B batch, H heads of queries, G of keys, R = H / G, L queries and S keys here, K key size, V value size,
E elements (head, token) of a rank, N numbers at each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import QueryPlacement, SoftmaxCall, attend_exactly
from dist_attn.sharded.block_table import BlockTable, Range, TableBlock
from dist_attn.sharded.redistribution import block_views, redistribute
from dist_attn.sharded.redistribution_plan import Change, RedistributionPlan, plan_redistribution
from dist_attn.sharded.sharding import Sharding, placement_of


@dataclass(frozen=True)
class HeadPart:
    """These ranges of queries, over these keys, of all key heads in a range and the query heads that read them."""

    heads: Range
    queries: tuple[Range, ...]
    keys: Range

    @property
    def whole(self) -> bool:
        """Return whether the queries start at the first and have no gap, as kernels for whole sequences need them."""
        return len(self.queries) == 1 and self.queries[0][0] == 0


@lru_cache(maxsize=128)
def head_parts(heads: int, queries: int, keys: int, ranks: int, *, causal: bool) -> tuple[tuple[HeadPart, ...], ...]:
    """The parts of each rank: at most one range of whole heads, and a share of a head before and after it."""
    return tuple(
        tuple(_parts(heads, queries, keys, ranks, causal, rank * heads, (rank + 1) * heads)) for rank in range(ranks)
    )


def _parts(heads: int, queries: int, keys: int, ranks: int, causal: bool, start: int, stop: int) -> list[HeadPart]:
    """The parts of [start, stop), in units of 1 / ranks of a head."""
    first, last = -(-start // ranks), stop // ranks
    found: list[tuple[Range, tuple[Range, ...]]] = []
    if first > last:  # inside one head
        found.append(((last, first), _share(queries, start - last * ranks, stop - last * ranks, ranks, causal)))
    else:
        found.append(((first - 1, first), _share(queries, start - (first - 1) * ranks, ranks, ranks, causal)))
        found.append(((first, last), ((0, queries),) if queries else ()))
        found.append(((last, last + 1), _share(queries, 0, stop - last * ranks, ranks, causal)))
    parts = []
    for of_heads, of_queries in found:
        if of_queries and of_heads[0] < of_heads[1]:
            seen = min(keys, of_queries[-1][1]) if causal else keys
            parts.append(HeadPart(of_heads, of_queries, (0, seen)))
    return parts


def _share(queries: int, start: int, stop: int, of: int, causal: bool) -> tuple[Range, ...]:
    """The queries in [start, stop) / of of a head, in order; nothing where that is no query."""
    folded = -(-queries // 2) if causal else queries
    a, b = ((edge * folded + of // 2) // of for edge in (start, stop))
    if not causal:
        ranges = [(a, b)]
    elif b == folded:
        ranges = [(a, queries - a)]  # the two halves touch in the middle
    else:
        ranges = [(a, b), (queries - b, queries - a)]
    return tuple((first, last) for first, last in ranges if first < last)


def sharded_softmax_attention(sharding: Sharding, call: SoftmaxCall) -> torch.Tensor:
    """`ops.softmax_attention` on this rank's slice; keys lie on the layout of the memory, which may be cut elsewhere.

    Documents of the layouts attend to themselves; that of a memory attends to the document of the same number. Relative
    positions are equal on all ranks; each takes the rows of the heads that it attends with, and has their gradients.
    Shapes: as `ops.softmax_attention`, L and S local.
    Cost: two all-to-alls, exactly `head_reshuffle_plans(…)`'s traffic; for G divisible by P and even slices, per rank
        and batch element (P - 1) / P of (L H K + S G K + S G V) elements there and of L H V back. Where a head is
        shared between ranks, its keys and values go to each of them.
    Raises: ShapeError when shapes do not fit together.
    """
    call.check()
    comm, layout, memory, causal = sharding.comm, sharding.layout, sharding.memory, call.causal
    q_BHLK, k_BGSK, v_BGSV = call.qkv
    batch, heads, length, size = q_BHLK.shape
    groups, keys, values = k_BGSK.shape[1], k_BGSK.shape[2], v_BGSV.shape[3]
    repeats = heads // groups
    numbers = (batch * repeats * size, batch * size, batch * values)
    there, back = head_reshuffle_plans(layout, memory, groups, numbers, batch * repeats * values, causal=causal)
    q_EN, k_EN, v_EN = redistribute(
        comm,
        there,
        q_BHLK.unflatten(1, (groups, repeats)).permute(1, 3, 0, 2, 4).reshape(groups * length, numbers[0]),
        k_BGSK.permute(1, 2, 0, 3).reshape(groups * keys, numbers[1]),
        v_BGSV.permute(1, 2, 0, 3).reshape(groups * keys, numbers[2]),
        label="heads",
    )
    parts = head_parts(groups, layout.total, memory.total, comm.size, causal=causal)[there.players.index(comm.rank)]
    placements = [_placement(part, layout, memory, call) for part in parts]
    shapes = ((batch, repeats, size), (batch, 1, size), (batch, 1, values))
    blocks = [
        [block.unflatten(2, shape) for block in block_views(table, comm.rank, x)]
        for table, x, shape in zip(there.targets, (q_EN, k_EN, v_EN), shapes, strict=True)
    ]
    # Also with no head of its own a rank joins the way back, forward and backward: with no rows, but of its graph.
    nothing = q_EN.flatten()[:0].clone().view(0, batch * repeats * values)
    rows_EN = [nothing + sum(t.flatten()[:0].sum() for t in call.options.tensors().values() if t is not None)]
    rows_EN += _attend(call, parts, placements, blocks)
    # The blocks are not needed any more, and must not take memory beside what goes back.
    del q_EN, k_EN, v_EN, blocks
    attended_EN = torch.cat(rows_EN)
    del rows_EN
    (out_EN,) = redistribute(comm, back, attended_EN, label="heads back")
    out_BGRLV = out_EN.reshape(groups, length, batch, repeats, values).permute(2, 0, 3, 1, 4)
    return out_BGRLV.flatten(1, 2)


@lru_cache(maxsize=64)
def head_reshuffle_plans(
    layout: SequenceLayout,
    memory: SequenceLayout,
    groups: int,
    numbers: tuple[int, int, int],
    out_numbers: int,
    *,
    causal: bool,
) -> tuple[RedistributionPlan, RedistributionPlan]:
    """Plan the moves of q, k, v to the heads and of the outputs back; `numbers` lie at each [key head, token]."""
    ranks = layout.size
    parts = head_parts(groups, layout.total, memory.total, ranks, causal=causal)
    q_blocks = [TableBlock(r, (p.heads, q)) for r, of_rank in enumerate(parts) for p in of_rank for q in p.queries]
    k_blocks = [TableBlock(r, (p.heads, p.keys)) for r, of_rank in enumerate(parts) for p in of_rank]
    queries = BlockTable.grid([[0, groups], layout.cuts], range(ranks), ranks)
    keys = BlockTable.grid([[0, groups], memory.cuts], range(ranks), ranks)
    q_target = BlockTable(queries.shape, ranks, tuple(q_blocks))
    k_target = BlockTable(keys.shape, ranks, tuple(k_blocks))
    there = plan_redistribution(
        (
            Change(queries, q_target, numbers[0]),
            Change(keys, k_target, numbers[1]),
            Change(keys, k_target, numbers[2]),
        )
    )
    back = plan_redistribution((Change(there.targets[0], queries, out_numbers),), relabel=False)
    return there, back


def _placement(
    part: HeadPart, layout: SequenceLayout, memory: SequenceLayout, call: SoftmaxCall
) -> QueryPlacement | None:
    """The positions of a part's queries and keys; None where kernels for whole sequences can attend without them."""
    if not layout.documents and not memory.documents and (part.whole or not (call.causal or call.options.relative)):
        return None
    return placement_of(part.queries, [part.keys], layout, memory)


def _attend(
    call: SoftmaxCall,
    parts: Sequence[HeadPart],
    placements: Sequence[QueryPlacement | None],
    blocks: Sequence[Sequence[torch.Tensor]],
) -> Iterator[torch.Tensor]:
    """The outputs [L, B R V] of all heads of all parts, one after the other, in the order of the blocks of queries.

    Blocks are those of queries, keys and values, [heads, tokens, B, R, size] with R = 1 for keys and values.
    """
    q_blocks, k_blocks, v_blocks = blocks
    fragments = iter(q_blocks)
    repeats = q_blocks[0].shape[3] if q_blocks else 1
    for part, placement, k_ASB1K, v_ASB1V in zip(parts, placements, k_blocks, v_blocks, strict=True):
        own = [next(fragments) for _ in part.queries]
        for head in range(part.heads[1] - part.heads[0]):
            group = part.heads[0] + head
            q_LBRK = own[0][head] if len(own) == 1 else torch.cat([fragment[head] for fragment in own])
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q_LBRK, k_ASB1K[head], v_ASB1V[head]))
            options = call.options.of_heads(group * repeats, (group + 1) * repeats)
            out_BRLV = attend_exactly(SoftmaxCall(q, k, v, call.causal, options, placement))
            # A part of several fragments is a share of one head, so heads and fragments come in the order of blocks.
            yield out_BRLV.permute(2, 0, 1, 3).flatten(1)
