"""Affine recurrences over ranks: in turn and by every exchange equal one rank's, what they send, bits, documents."""

from functools import partial

import pytest
import torch

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.prefix_scan import ScanExchange
from tests.support.affine import KINDS, AffineInputs
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close

LENGTHS = (70, 0, 5, 64, 1)
EXCHANGES = ("auto", "gather", "exscan", "log_step", "serial_ring", "pipelined_ring", "two_level")
OPTIONS = [(channels, documents) for channels in (False, True) for documents in (None, (0, 9, 71, 139))]


def run(inputs: AffineInputs, ops: object, start: int, stop: int, last: bool):
    """Outputs, the state after, and gradients of a loss in which the state counts on the last rank."""
    leaves = inputs.leaves(start, stop)
    out, after = leaves.run(ops)
    whole = next(iter(inputs.sequence.values())).shape[2]
    weights = torch.randn(*out.shape[:2], whole, out.shape[3], generator=torch.Generator().manual_seed(9)).double()
    ((out * weights[:, :, start:stop]).sum() + float(last) * weighted_sum(after.s_BHKV)).backward()
    return out.detach(), after.s_BHKV.detach(), leaves.gradients()


def on_rank(comm: Communicator, inputs: AffineInputs, layout: SequenceLayout, exchange: str):
    """`run` of one rank's slice."""
    hosts = ((0, 1), (2, 3, 4)) if exchange == "two_level" else ()
    ops = ShardedSequenceOps(comm, layout, exchange=ScanExchange(exchange, hosts=hosts))
    return run(inputs, ops, *layout.range(comm.rank), comm.rank == comm.size - 1)


def check(inputs: AffineInputs, layout: SequenceLayout, ranks: list[tuple]) -> None:
    """What the ranks have computed is what one rank computes."""
    want, want_state, want_gradients = run(inputs, LocalSequenceOps(layout.documents), 0, layout.total, True)
    assert_close(torch.cat([rank[0] for rank in ranks], 2), want)
    for _, state, _ in ranks:
        assert_close(state, want_state, kind="state")
    for name, gradient in want_gradients.items():
        parts = [rank[2][name] for rank in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=name)


@pytest.mark.parametrize(
    ("kind", "exchange", "channels", "documents"),
    [
        # Every kind and every exchange meet each other, and each meets all four ways of decays and documents.
        (kind, exchange, *OPTIONS[(i + j) % len(OPTIONS)])
        for i, kind in enumerate(KINDS)
        for j, exchange in enumerate(EXCHANGES)
    ],
)
def test_ranks_equal_one_rank(kind, exchange, channels, documents):
    """Over uneven and empty slices, with documents and without, in turn and by a scan of every exchange."""
    layout = SequenceLayout.from_lengths(LENGTHS, documents=documents)
    inputs = AffineInputs.random(kind, layout.total, channels=channels)
    body = partial(on_rank, inputs=inputs, layout=layout, exchange=exchange)
    check(inputs, layout, run_simulated(body, layout.size))


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_bits_do_not_depend_on_ranks(kind):
    """With deterministic=True outputs, states and gradients along the tokens have the bits of one rank."""
    inputs = AffineInputs.random(kind, 64 * 5 + 9, channels=True, dtype=torch.float32)

    def body(comm: Communicator, layout: SequenceLayout):
        ops = ShardedSequenceOps(comm, layout, deterministic=True)
        return run(inputs, ops, *layout.range(comm.rank), comm.rank == comm.size - 1)

    results = []
    for size in (1, 2, 4):
        layout = SequenceLayout.even(64 * 5 + 9, size, 64)
        ranks = run_simulated(partial(body, layout=layout), size)
        cut = {name: torch.cat([rank[2][name] for rank in ranks], 2) for name in inputs.sequence}
        results.append((torch.cat([rank[0] for rank in ranks], 2), ranks[0][1], cut))
    for out, state, cut in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1])
        for name, gradient in cut.items():
            assert torch.equal(gradient, results[0][2][name]), name


@pytest.mark.parametrize("exchange", ["auto", "gather", "serial_ring"])
@pytest.mark.parametrize("kind", ["decay", "delta rule"])
@pytest.mark.parametrize("channels", [False, True])
def test_bytes_sent_are_the_formulas(kind, channels, exchange):
    """What every rank sends is independent of the length and equal to the formula, forward and backward."""
    batch, heads, size, values, ranks = 2, 4, 8, 5, 3
    weights = size * size if kind == "delta rule" else size if channels else 1
    message = costs.ScanMessage(batch * heads, size * values, 4, size, weights, heads)

    def body(comm: Communicator, tokens: int) -> list[int]:
        inputs = AffineInputs.random(
            kind, tokens, channels=channels, sizes=(batch, heads, size, values), dtype=torch.float32
        ).leaves()
        layout = SequenceLayout.from_lengths((tokens,) * ranks)
        ops = ShardedSequenceOps(comm, layout, exchange=exchange)
        comm.traffic.clear()
        out, _ = inputs.run(ops)
        forward = comm.traffic.bytes_sent
        out.sum().backward()
        return [forward, comm.traffic.bytes_sent - forward]

    for tokens in (3, 70):
        sent = run_simulated(partial(body, tokens=tokens), ranks)
        name = costs.usual_exchange(message, ranks) if exchange == "auto" else exchange
        want = [costs.scan_cost(name, message, ranks, rank).bytes_sent for rank in range(ranks)]
        assert [forward for forward, _ in sent] == want
        assert sum(backward for _, backward in sent) <= 2 * sum(want)


def test_many_ranks_take_a_scan():
    """Where ranks are many more than the heads, they do not wait for each other's turn."""
    assert costs.takes_turns(2, 8, erases=True) and costs.takes_turns(4, 8, erases=False)
    assert not costs.takes_turns(64, 8, erases=True) and not costs.takes_turns(8, 8, erases=False)


@pytest.mark.parametrize("kind", ["delta rule", "erasing"])
def test_states_keep_their_precision_under_autocast(kind):
    """In bfloat16 autocast a scan is as close to one rank as without, and no document reaches a later one."""
    layout = SequenceLayout.from_lengths((40, 30, 58), documents=(0, 35))
    inputs = AffineInputs.random(kind, layout.total, channels=True, dtype=torch.float32)

    def body(comm: Communicator, inputs: AffineInputs):
        ops, own = ShardedSequenceOps(comm, layout, exchange="gather"), inputs.leaves(*layout.range(comm.rank))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return own.run(ops)[0]

    def over_ranks() -> torch.Tensor:
        return torch.cat(run_simulated(partial(body, inputs=inputs), layout.size), 2)

    got = over_ranks()
    assert_close(got, inputs.run(LocalSequenceOps(layout.documents))[0])
    inputs.sequence["v"][:, :, :35] *= 100
    assert torch.equal(over_ranks()[:, :, 35:], got[:, :, 35:])
