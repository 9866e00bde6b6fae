"""Windows, soft caps and sinks of softmax attention over ranks: the oracle's outputs and gradients, bounded caches."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import MismatchError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache
from dist_attn.ops.softmax_attention import QueryPlacement, softmax_attention_naive
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.sharded_call import random_tensor

HEADS, GROUPS, SIZE, VALUES = 4, 2, 5, 3


@st.composite
def _streams(draw) -> list[SequenceLayout]:
    """Blocks of a stream over 1, 2 or 4 ranks, single tokens among them, with documents that start in some."""
    ranks, blocks = draw(st.sampled_from([1, 2, 4])), []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks) | st.just([0] * (ranks - 1) + [1]))
        starts = st.sets(st.integers(0, sum(lengths) - 1), max_size=2) if sum(lengths) else st.just(set())
        blocks.append(SequenceLayout.from_lengths(lengths, draw(st.none() | starts.map(sorted))))
    return blocks


def _leaves(total: int, *, sinks: bool) -> list[Tensor]:
    shapes = [(2, HEADS, total, SIZE), (2, GROUPS, total, SIZE), (2, GROUPS, total, VALUES), (HEADS,)]
    return [random_tensor(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes[: 3 + sinks])]


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    (loss + sum(0 * x.sum() for x in leaves)).backward()
    return [x.grad for x in leaves]


def _want(blocks: list[SequenceLayout], sinks: bool, given: dict) -> tuple[Tensor, list[Tensor]]:
    starts = list(accumulate((block.total for block in blocks), initial=0))
    positions = torch.arange(starts[-1])
    documents = [start + d for start, block in zip(starts, blocks, strict=False) for d in block.documents or ()]
    numbers = torch.bucketize(positions, torch.tensor(documents, dtype=torch.int64), right=True)
    placement = QueryPlacement(positions, positions, numbers, numbers)
    q, k, v, *sinks_H = leaves = _leaves(starts[-1], sinks=sinks)
    given = given | {"sinks_H": sinks_H[0]} if sinks else given
    out = softmax_attention_naive(q, k, v, causal=True, placement=placement, **given)
    return out.detach(), _gradients((out * random_tensor(*out.shape, seed=9)).sum(), leaves)


def _on_a_rank(
    comm: Communicator, blocks: list[SequenceLayout], sinks: bool, given: dict, cache: str, softmax: str
) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """Outputs of each block, gradients, and after each block the tokens so far and how many the cache holds here."""
    total = sum(block.total for block in blocks)
    q, k, v, *sinks_H = leaves = _leaves(total, sinks=sinks)
    given = given | {"sinks_H": sinks_H[0]} if sinks else given
    weights = random_tensor(2, HEADS, total, VALUES, seed=9)
    held, outs, loss, kept, at = KeyValueCache(k[:, :, :0], v[:, :, :0]), [], 0.0, [], 0
    for block in blocks:
        part = slice(*(at + edge for edge in block.range(comm.rank)))
        ops = ShardedSequenceOps(comm, block, cache=cache, softmax=softmax)
        out, held = ops.softmax_attention_streaming(q[:, :, part], k[:, :, part], v[:, :, part], held, **given)
        outs.append(out.detach())
        loss = loss + (out * weights[:, :, part]).sum()
        kept.append((held.tokens, held.k_BGSK.shape[2]))
        at += block.total
    return outs, _gradients(loss, leaves), kept


def _check(blocks: list[SequenceLayout], want, ranks: list, window: int | None, cache: str) -> None:
    assert_close(torch.cat([rank[0][number] for number in range(len(blocks)) for rank in ranks], 2), want[0])
    for index, gradient in enumerate(want[1]):
        assert_close(torch.stack([rank[1][index] for rank in ranks]).sum(0), gradient, kind="gradient", what=str(index))
    at, last = 0, 0
    for number, block in enumerate(blocks):
        last = at + block.documents[-1] if block.documents else last
        at += block.total
        tokens, held = zip(*(rank[2][number] for rank in ranks), strict=True)
        keep = at - last if window is None else min(at - last, window - 1)
        assert set(tokens) == {at - last}
        assert sum(held) == keep * (len(ranks) if cache == "whole" else 1)


@examples(50)
@given(
    blocks=_streams(),
    scale=st.sampled_from([None, 0.6]),
    window=st.sampled_from([None, 1, 4, 9]),
    softcap=st.sampled_from([None, 0.8]),
    sinks=st.booleans(),
    cache=st.sampled_from(["spread", "whole"]),
    softmax=st.sampled_from(["reshuffle", "ring"]),
)
def test_a_stream_over_ranks(blocks, scale, window, softcap, sinks, cache, softmax):
    """Uneven and empty slices, documents and single tokens: outputs and gradients of one whole call, caches cut."""
    given = {"scale": scale, "window": window, "softcap": softcap}
    body = partial(_on_a_rank, blocks=blocks, sinks=sinks, given=given, cache=cache, softmax=softmax)
    _check(blocks, _want(blocks, sinks, given), run_simulated(body, blocks[0].size), window, cache)


def test_ranks_with_other_windows_are_refused():
    """A window that differs between ranks is a MismatchError on all of them."""
    layout = SequenceLayout.from_lengths([3, 4])

    def body(comm: Communicator) -> None:
        q, k, v = (x[:, :, slice(*layout.range(comm.rank))] for x in _leaves(7, sinks=False))
        cache = KeyValueCache(k[:, :, :0], v[:, :, :0])
        ShardedSequenceOps(comm, layout).softmax_attention_streaming(q, k, v, cache, window=4 + comm.rank)

    with pytest.raises(MismatchError, match="window"):
        run_simulated(body, 2)
