"""Exact softmax across ranks, by head reshuffle and by ring: one rank's outputs and gradients, and the traffic."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.ops.softmax_attention import SoftmaxCall, SoftmaxOptions, softmax_attention_naive
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.head_reshuffle import head_parts, head_reshuffle_plans, sharded_softmax_attention
from dist_attn.sharded.redistribution_plan import RedistributionPlan, plan_redistribution
from dist_attn.sharded.ring_attention import ring_attention
from dist_attn.sharded.sharding import Sharding, placement_of
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.pairs import each_pair
from tests.support.ranks import run_ranks

EXCHANGES = {"reshuffle": sharded_softmax_attention, "ring": ring_attention}
SIZE, VALUES = 5, 4


def _inputs(
    heads: int, groups: int, queries: int, keys: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (2, heads, queries, SIZE),
        (2, groups, keys, SIZE),
        (2, groups, keys, VALUES),
        (2, heads, queries, VALUES),
    ]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def _on_a_rank(
    comm: Communicator,
    exchange: str,
    inputs: tuple[torch.Tensor, ...],
    layout: SequenceLayout,
    memory: SequenceLayout,
    causal: bool,
) -> list[torch.Tensor]:
    """This rank's output and gradients."""
    q, k, v, weights = inputs
    queries, keys = slice(*layout.range(comm.rank)), slice(*memory.range(comm.rank))
    leaves = [x[:, :, part].clone().requires_grad_() for x, part in ((q, queries), (k, keys), (v, keys))]
    call = SoftmaxCall(*leaves, causal, SoftmaxOptions(scale=0.7))
    out = EXCHANGES[exchange](Sharding(comm, layout, memory), call)
    (out * weights[:, :, queries]).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _check(
    exchange: str,
    layout: SequenceLayout,
    memory: SequenceLayout,
    heads: int,
    groups: int,
    causal: bool,
    kind: Any = "simulated",
) -> None:
    inputs = _inputs(heads, groups, layout.total, memory.total)
    q, k, v, weights = inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = placement_of([(0, layout.total)], [(0, memory.total)], layout, memory)
    want = softmax_attention_naive(*leaves, causal=causal, scale=0.7, placement=whole)
    ((want * weights).sum() + sum(0 * x.sum() for x in leaves)).backward()
    work = partial(_on_a_rank, exchange=exchange, inputs=inputs, layout=layout, memory=memory, causal=causal)
    ranks = run_ranks(kind, work, layout.size)
    assert_close(torch.cat([r[0] for r in ranks], 2), want)
    for index, leaf in enumerate(leaves):
        got = torch.cat([r[index + 1] for r in ranks], 2)
        assert_close(got, leaf.grad, kind="gradient", what="qkv"[index])


@st.composite
def _layouts(draw, ranks: int, documents: bool) -> SequenceLayout:
    lengths = draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))
    total = sum(lengths)
    starts = sorted(draw(st.sets(st.integers(0, total - 1)))) if documents and total else [] if documents else None
    return SequenceLayout.from_lengths(lengths, starts)


@examples(80)
@given(
    exchange=st.sampled_from(sorted(EXCHANGES)),
    ranks=st.integers(1, 6),
    groups=st.integers(1, 4),
    repeats=st.integers(1, 3),
    causal=st.booleans(),
    documents=st.booleans(),
    cross=st.booleans(),
    data=st.data(),
)
def test_any_cut_of_any_heads(exchange, ranks, groups, repeats, causal, documents, cross, data):
    """Any heads over any ranks, grouped, causal or not, packed or not, cross too: one rank's output and gradients."""
    layout = data.draw(_layouts(ranks, documents))
    memory = data.draw(_layouts(ranks, documents)) if cross else layout
    _check(exchange, layout, memory, groups * repeats, groups, causal)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_over_processes(exchange):
    """The same over real processes joined by gloo, more ranks than heads, with an empty slice and documents."""
    layout = SequenceLayout.from_lengths([9, 0, 14], documents=[0, 3, 9, 10])
    _check(exchange, layout, layout, 2, 1, True, "gloo")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("causal", [True, False])
def test_slices_of_more_than_one_tile(exchange, causal):
    """Slices longer than the tiles that are computed at once, one head for three ranks."""
    layout = SequenceLayout.from_lengths([300, 1, 1400])
    _check(exchange, layout, SequenceLayout.from_lengths([1100, 500, 77]), 1, 1, causal)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_future_and_other_documents_change_nothing(exchange):
    """A token of a later place or of another document changes no bit of what a document or the past gives out."""
    layout = SequenceLayout.from_lengths([6, 9, 4], documents=[0, 5, 8])
    q, k, v, _ = _inputs(3, 3, 19, 19)

    def run(changed: int | None) -> torch.Tensor:
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            if changed is not None:
                x[:, :, changed] += 1.0

        def body(comm: Communicator) -> torch.Tensor:
            part = slice(*layout.range(comm.rank))
            call = SoftmaxCall(*(x[:, :, part] for x in inputs), causal=True)
            return EXCHANGES[exchange](Sharding(comm, layout, layout), call)

        return torch.cat(run_simulated(body, 3), 2)

    before, after = run(None), run(6)
    same = [0, 1, 2, 3, 4, 5, *range(8, 19)]
    assert torch.equal(before[:, :, same], after[:, :, same])
    assert not torch.equal(before[:, :, 6:8], after[:, :, 6:8])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_half_precision(exchange):
    """In bf16 the result over ranks is as close to float64 as one rank's."""
    layout = SequenceLayout.from_lengths([20, 13])
    q, k, v, _ = _inputs(3, 3, 33, 33, torch.bfloat16)

    def body(comm: Communicator) -> torch.Tensor:
        part = slice(*layout.range(comm.rank))
        call = SoftmaxCall(*(x[:, :, part] for x in (q, k, v)), causal=True)
        return EXCHANGES[exchange](Sharding(comm, layout, layout), call)

    out = torch.cat(run_simulated(body, 2), 2)
    assert_close(out, softmax_attention_naive(q.double(), k.double(), v.double(), causal=True).bfloat16())


@pytest.mark.parametrize(("ranks", "heads", "causal"), each_pair((1, 2, 3, 4, 5, 7), (1, 2, 3, 12), (True, False)))
def test_shares_of_heads_are_even(heads, ranks, causal):
    """Every query of every head has one rank, and no rank sees more pairs than one query's worth above its share."""
    queries = 101
    seen = torch.zeros(heads, queries, dtype=torch.int64)
    work = []
    for of_rank in head_parts(heads, queries, queries, ranks, causal=causal):
        pairs = 0
        for part in of_rank:
            for start, stop in part.queries:
                seen[slice(*part.heads), start:stop] += 1
                each = torch.arange(start, stop) + 1 if causal else torch.full((stop - start,), queries)
                assert not causal or stop <= part.keys[1]
                pairs += int(each.sum()) * (part.heads[1] - part.heads[0])
        work.append(pairs)
    assert bool((seen == 1).all())
    # A share ends on a whole query (a pair of folded ones) at each of its two ends.
    assert max(work) - sum(work) / ranks <= 2 * (queries + 1)


@pytest.mark.parametrize(
    ("lengths", "heads", "groups"), [((8, 8, 8, 8), 4, 4), ((5, 0, 17), 2, 1), ((3, 29), 6, 3), ((4, 9, 0, 1, 7), 3, 3)]
)
def test_bytes_of_the_reshuffle(lengths, heads, groups):
    """Both all-to-alls send exactly what the plans state; for even cuts that is the formula of the docstring."""
    layout = SequenceLayout.from_lengths(lengths)
    q, k, v, _ = _inputs(heads, groups, layout.total, layout.total)

    def body(comm: Communicator) -> list[tuple[str, int]]:
        part = slice(*layout.range(comm.rank))
        comm.traffic.clear()
        own = (x[:, :, part] for x in (q, k, v))
        sharded_softmax_attention(Sharding(comm, layout, layout), SoftmaxCall(*own, causal=True))
        return [(event.label, event.bytes_sent) for event in comm.traffic.events]

    repeats = heads // groups
    numbers = (2 * repeats * SIZE, 2 * SIZE, 2 * VALUES)
    there, back = head_reshuffle_plans(layout, layout, groups, numbers, 2 * repeats * VALUES, causal=True)
    for rank, events in enumerate(run_simulated(body, len(lengths))):
        sent = [8 * (sum(plan.sends(rank)) - plan.sends(rank)[rank]) for plan in (there, back)]
        assert events == [("heads", sent[0]), ("heads back", sent[1])]
        if lengths == (8, 8, 8, 8):
            assert sent == [8 * 2 * 3 * 8 * 4 * (2 * SIZE + VALUES) // 4, 8 * 2 * 3 * 8 * 4 * VALUES // 4]


def test_relabelled_ranks_send_less():
    """Where four ranks share a causal head, its folded queries go to the ranks that hold them: fewer bytes."""
    layout = SequenceLayout.even(48, 4)
    there, _ = head_reshuffle_plans(layout, layout, 1, (SIZE, SIZE, VALUES), VALUES, causal=True)
    in_order = plan_redistribution(there.changes, relabel=False)
    # Each rank now keeps six of its twelve queries; in order, only the first and the third do.
    assert in_order.traffic - there.traffic == 2 * 6 * SIZE + _keys_kept(there) - _keys_kept(in_order)


def _keys_kept(plan: RedistributionPlan) -> int:
    """Numbers of keys and values that do not travel."""
    pieces = [piece for rank in range(plan.ranks) for piece in plan.pieces[rank][rank]]
    return sum(piece.elements * plan.changes[piece.change].numbers for piece in pieces if piece.change > 0)


def test_bytes_of_the_ring():
    """Forward, a slice of keys and values is sent P - 1 times; backward again, and its gradients P times."""
    layout = SequenceLayout.from_lengths([3, 5, 0, 4])
    inputs = _inputs(4, 2, 12, 12)

    def body(comm: Communicator) -> list[tuple[str, int]]:
        comm.traffic.clear()
        _on_a_rank(comm, "ring", inputs, layout, layout, True)
        return [(event.label, event.bytes_sent) for event in comm.traffic.events]

    per_key = 8 * 2 * 2 * (SIZE + VALUES)
    for rank, events in enumerate(run_simulated(body, 4)):
        passing = [per_key * layout.lengths[(rank - number) % 4] for number in range(4)]
        assert [sent for label, sent in events if label == "ring with gradient"] == passing[:3]
        assert [sent for label, sent in events if label == "ring again"] == passing[:3]
        assert [sent for label, sent in events if label == "ring backward"] == passing


def test_the_exchange_is_an_explicit_choice():
    """ShardedSequenceOps takes the exchange by name, and keys on a layout of their own."""
    layout, memory = SequenceLayout.from_lengths([5, 9]), SequenceLayout.from_lengths([11, 6])
    q, k, v, _ = _inputs(2, 2, 14, 17)

    def body(comm: Communicator, exchange: Any) -> tuple[torch.Tensor, list[str]]:
        ops = ShardedSequenceOps(comm, layout, memory, softmax=exchange)
        queries, keys = slice(*layout.range(comm.rank)), slice(*memory.range(comm.rank))
        comm.traffic.clear()
        out = ops.softmax_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal=False)
        return out, [event.label for event in comm.traffic.events]

    want = softmax_attention_naive(q, k, v, causal=False)
    for exchange, labels in (("reshuffle", ["heads", "heads back"]), ("ring", ["ring"])):
        ranks = run_simulated(partial(body, exchange=exchange), 2)
        assert_close(torch.cat([r[0] for r in ranks], 2), want)
        assert all(r[1] == labels for r in ranks)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_layout_in_which_no_document_starts(exchange):
    """Queries of which none starts a document go with a memory without documents."""
    layout = SequenceLayout.from_lengths([4, 7], documents=[])
    _check(exchange, layout, SequenceLayout.from_lengths([5, 3]), 2, 2, True)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_documents_of_one_side_alone_are_refused(exchange):
    """Queries with documents over a memory without them are an InputError on every rank."""
    layout, memory = SequenceLayout.from_lengths([2, 2], documents=[0]), SequenceLayout.from_lengths([2, 2])
    q, k, v, _ = _inputs(2, 2, 2, 2)

    def body(comm: Communicator) -> None:
        with pytest.raises(InputError, match="give both, or neither"):
            EXCHANGES[exchange](Sharding(comm, layout, memory), SoftmaxCall(q, k, v, causal=False))

    run_simulated(body, 2)
