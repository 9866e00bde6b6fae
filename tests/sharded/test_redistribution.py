"""Redistribution: least traffic, exactly what the plan states, any tables, and gradients by the way back."""

from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.sharded.block_table import BlockTable, TableBlock
from dist_attn.sharded.redistribution import block_views, redistribute
from dist_attn.sharded.redistribution_plan import Change, RedistributionPlan, plan_redistribution
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.ranks import run_ranks


@st.composite
def _tables(draw, shape: tuple[int, ...], ranks: int) -> BlockTable:
    """A table of a tensor of this shape: cut anywhere, empty blocks too, each block on any rank."""
    cuts = [[0, *sorted(draw(st.lists(st.integers(0, size), max_size=4))), size] for size in shape]
    count = 1
    for c in cuts:
        count *= len(c) - 1
    return BlockTable.grid(cuts, draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count)), ranks)


@st.composite
def _changes(draw, *, most_ranks: int = 4, most_tensors: int = 3) -> tuple[Change, ...]:
    ranks = draw(st.integers(1, most_ranks))
    changes = []
    for _ in range(draw(st.integers(1, most_tensors))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
        transpose = len(shape) == 2 and draw(st.booleans())
        source, target = draw(_tables(shape, ranks)), draw(_tables(shape[::-1] if transpose else shape, ranks))
        changes.append(Change(source, target, draw(st.integers(0, 3)), transpose, draw(st.sampled_from([1.0, -0.5]))))
    return tuple(changes)


def _cyclic(shape: tuple[int, int], block: tuple[int, int], grid: tuple[int, int]) -> BlockTable:
    """ScaLAPACK's block-cyclic table: blocks of one size dealt out in turns over a grid of ranks, row-major."""
    cuts = [[*range(0, size, step), size] for size, step in zip(shape, block, strict=True)]
    places = product(*(range(len(c) - 1) for c in cuts))
    owners = [row % grid[0] * grid[1] + column % grid[1] for row, column in places]
    return BlockTable.grid(cuts, owners, grid[0] * grid[1])


def _tensor(shape: tuple[int, ...], numbers: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, numbers, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _kept(table: BlockTable, rank: int, x: torch.Tensor) -> torch.Tensor:
    """What a rank keeps of a whole tensor, by indexing."""
    parts = [x[tuple(slice(*r) for r in block.ranges)].reshape(block.elements, x.shape[-1]) for block in table.of(rank)]
    return torch.cat([x.new_empty(0, x.shape[-1]), *parts])


def _moved(change: Change, x: torch.Tensor) -> torch.Tensor:
    return change.scale * (x.transpose(0, 1) if change.transpose else x)


def _check(plan: RedistributionPlan, kind: str = "simulated") -> None:
    """Values, gradients, bytes and messages of a redistribution by this plan."""
    for got in run_ranks(kind, _Body(plan), plan.ranks):
        assert got


class _Body:
    """What a rank does and checks; a class, so that other processes can import it."""

    def __init__(self, plan: RedistributionPlan) -> None:
        self.plan = plan

    def __call__(self, comm: Communicator) -> bool:
        plan, rank = self.plan, comm.rank
        wholes = [_tensor(c.source.shape, c.numbers, i).requires_grad_() for i, c in enumerate(plan.changes)]
        mine = [_kept(c.source, rank, w).detach().requires_grad_() for c, w in zip(plan.changes, wholes, strict=True)]
        comm.traffic.clear()
        outs = redistribute(comm, plan, *mine)
        (event,) = comm.traffic.events
        away = sum(plan.sends(rank)) - plan.sends(rank)[rank]
        assert (event.bytes_sent, event.label) == (8 * away, "redistribution with gradient")
        assert event.bytes_received == 8 * (sum(plan.receives(rank)) - plan.receives(rank)[rank])
        assert comm.traffic.messages == sum(n > 0 for other, n in enumerate(plan.sends(rank)) if other != rank)
        wanted = [_kept(t, rank, _moved(c, w)) for c, t, w in zip(plan.changes, plan.targets, wholes, strict=True)]
        for got, want in zip(outs, wanted, strict=True):
            assert_close(got, want, kind="exact")
        # The loss counts every copy with its own weight; the gradient of an element is the sum over all ranks' copies.
        weights = [[_tensor((t.elements(r),), c.numbers, 7 + r) for r in range(comm.size)]
                   for c, t in zip(plan.changes, plan.targets, strict=True)]  # fmt: skip
        sum((out * w[rank]).sum() for out, w in zip(outs, weights, strict=True)).backward()
        everywhere = sum(
            (_kept(t, r, _moved(c, x)) * w[r]).sum()
            for c, t, x, w in zip(plan.changes, plan.targets, wholes, weights, strict=True)
            for r in range(comm.size)
        )
        gradients = torch.autograd.grad(everywhere, wholes)
        for leaf, change, gradient in zip(mine, plan.changes, gradients, strict=True):
            assert_close(leaf.grad, _kept(change.source, rank, gradient), kind="gradient")
        return True


@examples(60)
@given(changes=_changes(), relabel=st.booleans())
def test_any_tables_to_any_tables(changes, relabel):
    """Whatever the tables: elements arrive transposed and scaled, gradients come back, and bytes are the plan's."""
    _check(plan_redistribution(changes, relabel=relabel))


def test_over_processes():
    """The same over real processes joined by gloo, with a rank that has nothing before and another after."""
    source = BlockTable.grid([[0, 3, 8], [0, 5]], [0, 2], 3)
    target = BlockTable.grid([[0, 1, 5], [0, 4, 8]], [1, 0, 0, 1], 3)
    _check(plan_redistribution((Change(source, target, 2, True, 0.5),)), "gloo")


@examples(60)
@given(changes=_changes(most_ranks=5, most_tensors=2))
def test_no_relabelling_sends_less(changes):
    """Of all ways to give the parts to the ranks, tried one by one, none has less traffic than the plan."""
    ranks = changes[0].source.ranks
    found = plan_redistribution(changes)
    assert sorted(found.players) == list(range(ranks))

    def traffic(players: tuple[int, ...]) -> int:
        relabelled = (Change(c.source, c.target.relabelled(players), c.numbers, c.transpose, c.scale) for c in changes)
        return plan_redistribution(tuple(relabelled), relabel=False).traffic

    assert found.traffic == min(traffic(players) for players in permutations(range(ranks)))
    assert found.traffic == sum(sum(n for r, n in enumerate(found.sends(s)) if r != s) for s in range(ranks))
    # One message for each pair that has anything to say to each other.
    assert found.messages == sum(n > 0 for s in range(ranks) for r, n in enumerate(found.sends(s)) if r != s)


def test_a_relabelling_can_save_everything():
    """Blocks that only change their names do not move, and nothing is relabelled where it saves nothing."""
    source = BlockTable.grid([[0, 2, 4, 6]], [0, 1, 2], 3)
    turned = BlockTable.grid([[0, 2, 4, 6]], [1, 2, 0], 3)
    assert plan_redistribution((Change(source, turned),)).traffic == 0
    assert plan_redistribution((Change(source, turned),), relabel=False).traffic == 6
    nothing = BlockTable.grid([[0, 0]], [2], 3)
    assert plan_redistribution((Change(nothing, nothing),)).players == (0, 1, 2)


def test_copies_add_up_their_gradients():
    """A target whose blocks overlap gives every rank its copy, and the gradients of the copies are summed."""
    source = BlockTable.grid([[0, 4, 9]], [0, 1], 3)
    target = BlockTable((9,), 3, tuple(TableBlock(rank, ((rank, 9),)) for rank in range(3)))
    plan = plan_redistribution((Change(source, target, 2),))
    assert plan.traffic == 2 * (9 + 8 + 7 - max(4 + 5, 4 + 5))
    _check(plan)


def test_block_cyclic_tables():
    """From ScaLAPACK's block-cyclic form over a 2 x 2 grid to rows, and transposed over a 1 x 4 grid."""
    cyclic = _cyclic((7, 10), (2, 3), (2, 2))
    assert cyclic.partition
    assert [cyclic.elements(rank) for rank in range(4)] == [24, 16, 18, 12]
    rows = BlockTable.grid([[0, 1, 4, 4, 7], [0, 10]], [0, 1, 2, 3], 4)
    _check(plan_redistribution((Change(cyclic, rows), Change(cyclic, _cyclic((10, 7), (3, 1), (1, 4)), 1, True))))


def test_a_second_derivative():
    """The way back is differentiable too."""
    source = BlockTable.grid([[0, 2, 5]], [0, 1], 2)
    target = BlockTable.grid([[0, 4, 5]], [0, 1], 2)
    plan = plan_redistribution((Change(source, target, 1, False, 3.0),))

    def body(comm: Communicator) -> torch.Tensor:
        x = torch.arange(5.0)[2 * comm.rank : 2 + 3 * comm.rank, None].double().requires_grad_()
        (y,) = redistribute(comm, plan, x)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second[:, 0]

    assert_close(torch.cat(run_simulated(body, 2)), 6 * 27 * torch.arange(5.0).double())


def test_views_share_memory():
    """The views of what a rank keeps are its blocks, in memory that it owns."""
    table = BlockTable.grid([[0, 1, 3], [0, 2]], [1, 1], 2)
    x = torch.arange(6.0)[:, None]
    views = block_views(table, 1, x)
    assert [tuple(view.shape) for view in views] == [(1, 2, 1), (2, 2, 1)]
    views[1][0, 0] = 9.0
    assert x[2, 0] == 9.0
    assert block_views(table, 0, x[:0]) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockTable((2, 2, 2), 1, ()), "1 or 2 dimensions"),
        (lambda: BlockTable((4,), 2, (TableBlock(2, ((0, 4),)),)), "does not fit"),
        (lambda: BlockTable((4,), 2, (TableBlock(0, ((0, 5),)),)), "does not fit"),
        (lambda: BlockTable.grid([[0, 3, 2]], [0, 0], 1), "never fall"),
        (lambda: BlockTable.grid([[0, 3]], [0, 0], 1), "2 owners for 1 blocks"),
        (lambda: Change(BlockTable((4,), 1, (TableBlock(0, ((0, 3),)),)), BlockTable.grid([[0, 4]], [0], 1)), "leave"),
        (lambda: Change(BlockTable.grid([[0, 4]], [0], 1), BlockTable.grid([[0, 3]], [0], 1)), "same elements"),
        (lambda: plan_redistribution(()), "one tensor or more"),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    """Tables, changes and plans that make no sense are refused before anything is exchanged."""
    with pytest.raises(InputError, match=words):
        make()


def test_tensors_that_do_not_fit_are_named():
    """Another number of elements, of tensors, or of dtypes than the plan's is a ShapeError."""
    table = BlockTable.grid([[0, 2]], [0], 1)
    plan = plan_redistribution((Change(table, table), Change(table, table)))

    def body(comm: Communicator) -> None:
        with pytest.raises(ShapeError, match=r"was given \[3, 1\]"):
            redistribute(comm, plan, torch.zeros(2, 1), torch.zeros(3, 1))
        with pytest.raises(ShapeError, match="one dtype"):
            redistribute(comm, plan, torch.zeros(2, 1), torch.zeros(2, 1).double())
        with pytest.raises(ShapeError, match="2 tensors"):
            redistribute(comm, plan, torch.zeros(2, 1))

    run_simulated(body, 1)
