"""Sharded = unsharded for operations with more in view than a state: any sizes over any cut, and what each sends."""

import pytest
import torch
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from tests.support.examples import examples
from tests.support.sharded_call import check_sharded, random_tensor

CUTS = st.lists(st.sampled_from([0, 1, 2, 6, 17, 70]), min_size=1, max_size=5)
ANY = examples(25)


ON_HEADS = {
    "softmax": lambda ops, t: (ops.softmax_attention(t[0], t[0], t[0], causal=True),),
}


@pytest.mark.parametrize("name", ON_HEADS)
def test_an_empty_batch(name):
    """No sequences in, no outputs out, forward and backward."""
    x = torch.zeros(0, 3, 14, 3, dtype=torch.float64)
    check_sharded(ON_HEADS[name], SequenceLayout.from_lengths((5, 0, 9)), [x])


@pytest.mark.parametrize("lengths", [(3, 0, 5), (20, 30, 50)])
def test_bytes_sent(lengths):
    """What every rank sends is what the formulas say, to the byte, forward and backward."""
    layout, channels, modes = SequenceLayout.from_lengths(lengths), 4, 5
    x = random_tensor(2, layout.total, channels, seed=0)

    def body(comm: Communicator) -> None:
        ops, own = ShardedSequenceOps(comm, layout), slice(*layout.range(comm.rank))
        a = torch.full((channels, modes), 0.3 + 0.1j, dtype=torch.complex128)
        calls = {
            "gated_scan": (
                lambda u: ops.gated_scan(u, u)[0],
                costs.all_gather_bytes(8 * 2 * 2 * channels, layout.size),
            ),
            "selective_scan": (
                lambda u: ops.selective_scan(
                    u, u, a.real, u[..., :1].expand(-1, -1, modes), u[..., :1].expand(-1, -1, modes)
                )[0],
                costs.all_gather_bytes(8 * 2 * 2 * channels * modes, layout.size),
            ),
        }
        for name, (call, want) in calls.items():
            leaf = x[:, own].clone().requires_grad_()
            comm.traffic.clear()
            y = call(leaf)
            forward = comm.traffic.bytes_sent
            y.sum().backward()
            assert (name, forward) == (name, want)
            assert (name, comm.traffic.bytes_sent - forward) == (name, want)

    run_simulated(body, layout.size)
