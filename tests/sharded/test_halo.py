"""Halos of any width over any cut, and sums over the sequence: one rank's results, and the bytes of their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from tests.support.examples import examples
from tests.support.sharded_call import check_sharded, random_tensor

CUTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@examples(40)
@given(lengths=CUTS, taps=st.integers(1, 14), centred=st.booleans())
def test_a_halo_spans_as_many_ranks_as_it_needs(lengths, taps, centred):
    """However short the slices are against the taps, outputs and gradients are one rank's."""
    check_sharded(
        lambda ops, t: (ops.convolve(t[0], t[1], centred=centred),),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
        whole=[random_tensor(taps, 3, seed=1)],
    )


@examples(30)
@given(lengths=CUTS, taps=st.integers(1, 14))
def test_a_tail_comes_in_and_goes_out(lengths, taps):
    """With a tail before the first token, outputs, the tail after the last one and all gradients are one rank's."""
    check_sharded(
        lambda ops, t: ops.convolve_streaming(*t),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
        whole=[random_tensor(taps, 3, seed=1), random_tensor(2, taps - 1, 3, seed=2)],
    )


@examples(20)
@given(lengths=CUTS)
def test_sums_over_any_cut(lengths):
    """The sum over the sequence is the same on every rank, empty ones too, and every token gets its gradient."""
    check_sharded(
        lambda ops, t: (t[0], ops.sum_over_sequence(t[0] ** 2)),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
    )


@pytest.mark.parametrize("taps", [1, 4, 30])
@pytest.mark.parametrize("lengths", [(5, 9), (13, 0, 4)])
def test_bytes_sent(lengths, taps):
    """A convolution sends a halo of K - 1 tokens to every other rank, centred or not, and a sum is one all-reduce."""
    layout = SequenceLayout.from_lengths(lengths)

    def body(comm: Communicator) -> list[int]:
        ops, x = ShardedSequenceOps(comm, layout), torch.zeros(2, layout.lengths[comm.rank], 3)
        w, sent = torch.zeros(taps, 3), []
        calls = [
            lambda: ops.convolve(x, w),
            lambda: ops.convolve(x, w, centred=True),
            lambda: ops.convolve_streaming(x, w),
            lambda: ops.sum_over_sequence(x),
        ]
        for call in calls:
            comm.traffic.clear()
            call()
            sent.append(comm.traffic.bytes_sent)
        return sent

    halo = costs.halo_bytes(2, 3, taps, layout.size)
    want = [halo, halo, halo, costs.all_reduce_bytes(2 * 3, 4, layout.size)]
    assert run_simulated(body, layout.size) == [want] * layout.size
