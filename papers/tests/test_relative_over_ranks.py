"""Relative attention over ranks: memories on layouts of their own, streams that continue, and what is sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops.relative_attention import (
    RelativeState,
    WindowState,
    relative_attention,
    relative_attention_naive,
    relative_attention_streaming,
)
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.sharded_call import check_sharded, random_tensor

LAYOUTS = [
    ((5, 9), (3, 4)),
    ((3, 4), (0, 40)),
    ((0, 11, 2), (30, 0, 7)),
    ((4, 0, 4, 1), (0, 0, 9, 0)),
    ((2, 3, 1), (0, 0, 0)),
    ((0, 0), (3, 8)),
    ((70, 130, 5), (90, 1, 60)),
]


def _positive(*shape: int, seed: int) -> torch.Tensor:
    return random_tensor(*shape, seed=seed).abs() + 0.05


def _check_memory(queries: tuple[int, ...], keys: tuple[int, ...], reach: int, causal: bool) -> None:
    check_sharded(
        lambda ops, t: (relative_attention(*t, causal=causal, ops=ops),),
        SequenceLayout.from_lengths(queries),
        [_positive(2, 2, sum(queries), 5, seed=0)],
        memory_layout=SequenceLayout.from_lengths(keys),
        memory=[_positive(2, 2, sum(keys), 5, seed=1), random_tensor(2, 2, sum(keys), 3, seed=2)],
        whole=[_positive(2, 2 * reach + 1, 5, seed=3)],
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [0, 1, 4, 50])
@pytest.mark.parametrize(("queries", "keys"), LAYOUTS)
def test_a_memory_of_its_own(queries, keys, reach, causal):
    """Queries and keys cut differently, and of other numbers, give one rank's outputs and gradients for any k."""
    _check_memory(queries, keys, reach, causal)


@examples(30)
@given(
    cuts=st.integers(1, 5).flatmap(
        lambda size: st.tuples(*(st.lists(st.integers(0, 20), min_size=size, max_size=size) for _ in range(2)))
    ),
    reach=st.integers(0, 12),
    causal=st.booleans(),
)
def test_a_memory_for_any_cut(cuts, reach, causal):
    """However queries and keys are cut over 1 to 5 ranks, nothing changes."""
    _check_memory(tuple(cuts[0]), tuple(cuts[1]), reach, causal)


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("reach", [0, 1, 4, 30])
@pytest.mark.parametrize("lengths", [(7,), (5, 9), (13, 0, 4), (0, 11, 2, 2, 1), (70, 130)])
def test_streams_over_ranks(lengths, reach, given_state):
    """Causal outputs from a state, the final state on every rank and all gradients are those of one rank."""
    total, width = sum(lengths), max(reach - 1, 0)

    def call(ops, t):
        q, k, v, rp, sums, far, near = t
        state = RelativeState(sums, WindowState(far, near, 9)) if given_state else None
        out, after = relative_attention_streaming(q, k, v, rp, state, ops=ops)
        return out, after.sz_BHMW, after.window.far_BHW, after.window.near_BHTW

    check_sharded(
        call,
        SequenceLayout.from_lengths(lengths),
        [_positive(2, 2, total, 5, seed=0), _positive(2, 2, total, 5, seed=1), random_tensor(2, 2, total, 3, seed=2)],
        whole=[
            _positive(2, 2 * reach + 1, 5, seed=3),
            _positive(2, 2, 5, 4, seed=4),
            _positive(2, 2, 4, seed=5),
            _positive(2, 2, width, 4, seed=6),
        ],
    )


@pytest.mark.parametrize("causal", [True, False])
def test_late_outputs_of_a_long_sequence_in_single_precision(causal):
    """With 60,000 tokens over ranks in float32, first and last outputs are those of float64 sums to 2e-5."""
    # Differences of running sums would have lost most digits there.
    layout = SequenceLayout.from_lengths([30_000, 0, 29_990, 10])
    q, k = (_positive(1, 1, layout.total, 4, seed=s).float() for s in (0, 1))
    v, rp = random_tensor(1, 1, layout.total, 2, seed=2).float(), _positive(1, 9, 4, seed=3).float() * 30

    def body(comm: Communicator) -> torch.Tensor:
        own = (t[:, :, slice(*layout.range(comm.rank))] for t in (q, k, v))
        return relative_attention(*own, rp, causal=causal, ops=ShardedSequenceOps(comm, layout))

    out = torch.cat(run_simulated(body, layout.size), 2)
    rows = [*range(6), *range(layout.total - 6, layout.total)]
    for row in rows:
        start, stop = 0, row + 1 if causal else layout.total
        distance = torch.arange(start, stop) - row
        scores = k[0, 0, start:stop].double() + rp[0].double()[distance.clamp(-4, 4) + 4]
        weights = scores @ q[0, 0, row].double()
        want = weights @ v[0, 0, start:stop].double() / weights.sum()
        assert torch.allclose(out[0, 0, row].double(), want, rtol=2e-5, atol=2e-5)


def _tokens_that_move(source, target, rank):
    """The tokens of this rank that stand on another one in the target layout; those behind its end stay."""
    start, end = sum(source[:rank]), sum(target)
    kept = max(0, min(start + source[rank], sum(target[: rank + 1])) - max(start, sum(target[:rank])))
    return max(0, min(start + source[rank], end) - start) - kept


@pytest.mark.parametrize("reach", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), LAYOUTS)
def test_bytes_sent(queries, keys, causal, reach):
    """What every rank sends is what the formulas say, to the byte."""
    layout, memory = SequenceLayout.from_lengths(queries), SequenceLayout.from_lengths(keys)
    features, values, groups = 5, 3, 4

    def body(comm: Communicator) -> None:
        ops = ShardedSequenceOps(comm, layout, memory)
        (a, b), (c, d) = layout.range(comm.rank), memory.range(comm.rank)
        comm.traffic.clear()
        k, v = torch.rand(2, 2, d - c, features), torch.rand(2, 2, d - c, values)
        relative_attention(
            torch.rand(2, 2, b - a, features), k, v, torch.rand(2, 2 * reach + 1, features), causal=causal, ops=ops
        )
        behind = memory.total > layout.total
        windows = 1 if causal else 2 + behind
        numbers = (features + windows * max(reach, 1)) * (values + 1)
        carry = costs.all_gather_bytes(4 * groups * numbers, layout.size)
        token_bytes = 4 * groups * (values + (features if causal else 0))
        assert comm.traffic.bytes_sent == carry + token_bytes * _tokens_that_move(keys, queries, comm.rank)

    run_simulated(body, layout.size)


def test_no_key_at_all_gives_zeros():
    """A query that sees no key has the output 0 on every rank, and nothing has a gradient that is not a number."""
    layout, memory = SequenceLayout.from_lengths([2, 3]), SequenceLayout.from_lengths([0, 0])

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.rand(1, 2, layout.lengths[comm.rank], 4).requires_grad_()
        rp = torch.rand(2, 5, 4)
        out = [
            relative_attention(
                q,
                torch.zeros(1, 2, 0, 4),
                torch.zeros(1, 2, 0, 3),
                rp,
                causal=causal,
                ops=ShardedSequenceOps(comm, layout, memory),
            )
            for causal in (True, False)
        ]
        torch.cat(out).sum().backward()
        assert q.grad is not None
        return torch.cat(out), q.grad

    for out, grad in run_simulated(body, 2):
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(grad, torch.zeros_like(grad))


def test_a_state_of_another_window_is_refused():
    """The shapes of the state and those needed are named before anything is exchanged."""
    layout = SequenceLayout.from_lengths([2, 2])

    def body(comm: Communicator) -> None:
        x, rp = torch.rand(1, 2, 2, 4), torch.rand(2, 7, 4)
        state = RelativeState.identity(1, 2, 4, 4, reach=2)
        with pytest.raises(ShapeError, match="these inputs need"):
            relative_attention_streaming(x, x, x, rp, state, ops=ShardedSequenceOps(comm, layout))

    run_simulated(body, 2)


def test_the_oracle_over_ranks():
    """A memory that is longer than the queries equals the oracle by definition, not only the local fast form."""
    layout, memory = SequenceLayout.from_lengths([3, 6]), SequenceLayout.from_lengths([12, 5])
    q, k = _positive(1, 1, 9, 4, seed=0), _positive(1, 1, 17, 4, seed=1)
    v, rp = random_tensor(1, 1, 17, 3, seed=2), _positive(1, 7, 4, seed=3)
    for causal in (True, False):

        def body(comm: Communicator, causal: bool = causal) -> torch.Tensor:
            (a, b), (c, d) = layout.range(comm.rank), memory.range(comm.rank)
            ops = ShardedSequenceOps(comm, layout, memory)
            return relative_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], rp, causal=causal, ops=ops)

        want = relative_attention_naive(q, k, v, rp, causal=causal)
        assert_close(torch.cat(run_simulated(body, 2), 2), want)
