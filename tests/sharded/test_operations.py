"""Sharded = unsharded for operations with more in view than a state: any sizes over any cut, and what each sends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.relative_attention import relative_attention
from dist_attn.sharded import ShardedSequenceOps
from tests.support.examples import examples
from tests.support.sharded_call import check_sharded, random_tensor

CUTS = st.lists(st.sampled_from([0, 1, 2, 6, 17, 70]), min_size=1, max_size=5)
ANY = examples(25)


@ANY
@given(lengths=CUTS, reach=st.sampled_from([0, 1, 4, 30]), causal=st.booleans())
def test_relative_attention(lengths, reach, causal):
    """Relative attention over ranks equals one rank's, for windows wider than a slice too, with all gradients."""
    total = sum(lengths)
    q, k, rp = (
        random_tensor(2, 3, total, 6, seed=0),
        random_tensor(2, 3, total, 6, seed=1),
        random_tensor(3, 2 * reach + 1, 6, seed=3),
    )
    check_sharded(
        lambda ops, t: (relative_attention(t[0].exp(), t[1].exp(), t[2], t[3].exp(), causal=causal, ops=ops),),
        SequenceLayout.from_lengths(lengths),
        [q, k, random_tensor(2, 3, total, 4, seed=2)],
        whole=[rp],
    )


RP = random_tensor(3, 5, 3, seed=1).exp()
ON_HEADS = {
    "relative causal": lambda ops, t: (relative_attention(t[0], t[0], t[0], RP, causal=True, ops=ops),),
    "relative full": lambda ops, t: (relative_attention(t[0], t[0], t[0], RP, causal=False, ops=ops),),
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


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_keeps_its_precision_under_autocast(causal):
    """Under bf16 autocast, relative attention keeps the bits it has without, on one rank and over several."""
    layout = SequenceLayout.from_lengths([20, 50])
    x, rp = random_tensor(1, 2, 70, 6, seed=0).exp().float(), random_tensor(2, 9, 6, seed=1).exp().float()

    def run(comm: Communicator, enabled: bool) -> list[torch.Tensor]:
        start, stop = layout.range(comm.rank)
        part = x[:, :, start:stop]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole = relative_attention(x, x, x, rp, causal=causal, ops=LocalSequenceOps())
            return [
                whole,
                relative_attention(part, part, part, rp, causal=causal, ops=ShardedSequenceOps(comm, layout)),
            ]

    for without, under in zip(*(run_simulated(lambda c, e=e: run(c, e), 2) for e in (False, True)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without, under, strict=True))
