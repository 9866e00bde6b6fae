"""The running maximum of gated sequences: the oracle, documents, closed gates, streams, and the same over ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.running_maximum import NO_TOKENS, running_maximum_naive
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.sharded_call import random_tensor


@examples(30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    gated=st.booleans(),
    closed=st.booleans(),
    documents=st.booleans(),
    begins=st.booleans(),
    data=st.data(),
)
def test_any_cut_equals_the_oracle(lengths, gated, closed, documents, begins, data):
    """Gates, closed ones too, and documents, over any ranks, behind a maximum or nothing: levels, rises and the end."""
    total = sum(lengths)
    starts = sorted(data.draw(st.sets(st.integers(0, total - 1)))) if documents and total else []
    x, before = 9 * random_tensor(2, 3, total, seed=0), random_tensor(2, 3, seed=1)
    before = torch.full_like(before, NO_TOKENS) if begins else before
    gates = -3 * random_tensor(2, 3, total, seed=2).abs() if gated else None
    if gates is not None and closed:
        gates = gates.masked_fill(random_tensor(2, 3, total, seed=3) > 0.8, -torch.inf)
    want = running_maximum_naive(x, before, log_gate_BHS=gates, documents=tuple(starts))
    local = LocalSequenceOps(tuple(starts) or None).running_maximum(x, before, log_gate_BHS=gates)
    layout = SequenceLayout.from_lengths(lengths, starts or None)

    def body(comm: Communicator):
        own = slice(*layout.range(comm.rank))
        return ShardedSequenceOps(comm, layout).running_maximum(
            x[..., own], before, log_gate_BHS=None if gates is None else gates[..., own]
        )

    ranks = run_simulated(body, layout.size)
    for index in range(3):
        assert_close(local[index], want[index])
        parts = [rank[index] for rank in ranks]
        for part in parts if index == 2 else [torch.cat(parts, dim=-1)]:
            assert_close(part, want[index])


def test_what_is_not_a_number_stays_in_its_document():
    """A NaN in one document reaches no later one, on one rank or over a cut."""
    x = random_tensor(1, 1, 8, seed=0)
    x[..., 2] = torch.nan
    layout = SequenceLayout.from_lengths([3, 5], [0, 5])

    def body(comm: Communicator):
        own = slice(*layout.range(comm.rank))
        return ShardedSequenceOps(comm, layout).running_maximum(x[..., own], torch.zeros(1, 1))

    local = LocalSequenceOps((0, 5)).running_maximum(x, torch.zeros(1, 1))
    over_ranks = [torch.cat(parts, dim=-1) for parts in zip(*(r[:2] for r in run_simulated(body, 2)), strict=True)]
    for level, rise in (local[:2], over_ranks):
        assert bool(level[..., 2:5].isnan().all())
        assert bool(level[..., 5:].isfinite().all()) and bool(rise[..., 5:].isfinite().all())
