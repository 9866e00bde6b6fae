"""Exact softmax over a stream of blocks with packed documents: one rank, a spread cache and a whole one, one oracle."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache, LocalSequenceOps
from dist_attn.ops.softmax_attention import QueryPlacement, SoftmaxCall, softmax_attention_naive
from dist_attn.sharded.head_reshuffle import sharded_softmax_attention
from dist_attn.sharded.sharding import Sharding
from dist_attn.sharded.softmax import attend_over_spread_cache, attend_over_whole_cache, last_document
from tests.support.closeness import assert_close
from tests.support.examples import examples

HEADS, GROUPS, SIZE, VALUES = 4, 2, 5, 3


@st.composite
def _streams(draw) -> list[SequenceLayout]:
    """Blocks of a stream over 1 to 4 ranks, with documents that start in some of them."""
    ranks, blocks = draw(st.integers(1, 4)), []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks))
        starts = st.sets(st.integers(0, sum(lengths) - 1), max_size=3) if sum(lengths) else st.just(set())
        blocks.append(SequenceLayout.from_lengths(lengths, draw(st.none() | starts.map(sorted))))
    return blocks


def _inputs(total: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, total, SIZE), (2, GROUPS, total, SIZE), (2, GROUPS, total, VALUES)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _want(blocks: list[SequenceLayout]) -> torch.Tensor:
    starts = list(accumulate((block.total for block in blocks), initial=0))
    positions = torch.arange(starts[-1])
    documents = [start + d for start, block in zip(starts, blocks, strict=False) for d in block.documents or ()]
    numbers = torch.bucketize(positions, torch.tensor(documents, dtype=torch.int64), right=True)
    placement = QueryPlacement(positions, positions, numbers, numbers)
    return softmax_attention_naive(*_inputs(starts[-1]), causal=True, placement=placement)


def _empty() -> KeyValueCache:
    empty = torch.zeros(2, GROUPS, 0, SIZE, dtype=torch.float64)
    return KeyValueCache(empty, empty[..., :VALUES])


def _on_a_rank(comm: Communicator, blocks: list[SequenceLayout], kept: str) -> tuple[list[torch.Tensor], KeyValueCache]:
    inputs, outs, cache, at = _inputs(sum(block.total for block in blocks)), [], _empty(), 0
    for block in blocks:
        start, stop = (at + edge for edge in block.range(comm.rank))
        q, k, v = (x[:, :, start:stop] for x in inputs)
        sharding, call = Sharding(comm, block, block), SoftmaxCall(q, k, v, causal=True)
        if kept == "whole":
            out, cache = attend_over_whole_cache(sharding, call, cache)
        elif cache.tokens:
            out, cache = attend_over_spread_cache(sharding, call, cache)
        else:
            out = sharded_softmax_attention(sharding, call)
            cache = last_document(cache.appended(k, v, (block.lengths,)), block, comm.rank)
        outs.append(out)
        at += block.total
    return outs, cache


@examples(60)
@given(blocks=_streams(), kept=st.sampled_from(["spread", "whole"]))
def test_a_stream_of_documents_over_ranks(blocks, kept):
    """Documents inside blocks and across them, over any ranks: the oracle, and a cache of the last document."""
    ranks = run_simulated(lambda comm: _on_a_rank(comm, blocks, kept), blocks[0].size)
    got = torch.cat([rank[0][number] for number in range(len(blocks)) for rank in ranks], 2)
    assert_close(got, _want(blocks))
    total = sum(block.total for block in blocks)
    last = max((sum(b.total for b in blocks[:n]) + block.documents[-1]
                for n, block in enumerate(blocks) if block.documents), default=0)  # fmt: skip
    held = [rank[1].k_BGSK.shape[2] for rank in ranks]
    assert [rank[1].tokens for rank in ranks] == [total - last] * len(ranks)
    assert held == [total - last] * len(ranks) if kept == "whole" else sum(held) == total - last


@examples(40)
@given(blocks=_streams())
def test_a_stream_of_documents_on_one_rank(blocks):
    """The local form takes the same stream block by block, and its cache owns its memory."""
    inputs, outs, cache, at = _inputs(sum(block.total for block in blocks)), [], _empty(), 0
    for block in blocks:
        q, k, v = (x[:, :, at : at + block.total] for x in inputs)
        out, cache = LocalSequenceOps(documents=block.documents).softmax_attention_streaming(q, k, v, cache)
        outs.append(out)
        at += block.total
    assert_close(torch.cat(outs, 2), _want(blocks))
    assert cache.k_BGSK.untyped_storage().nbytes() == cache.k_BGSK.numel() * 8


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_left_since_a_token(rank):
    """A spread cache cut at a token keeps what each rank held from there on, block by block."""
    blocks = ((2, 0, 1), (1, 3, 0), (0, 2, 2))
    held = sum(lengths[rank] for lengths in blocks)
    numbers = torch.arange(held).view(1, 1, held, 1).double()
    cache = KeyValueCache(numbers, numbers, blocks).since(4, rank)
    assert cache.blocks == ((0, 3, 0), (0, 2, 2))
    assert cache.tokens == 7
    assert cache.k_BGSK.flatten().tolist() == list(range(held))[held - (0, 5, 2)[rank] :]
