"""Packed documents over ranks: sharded = unsharded wherever documents start and wherever they are cut."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.pairs import each_pair
from tests.support.ranks import Kind, run_ranks
from tests.support.running_sum import RunningSumCall

LAYOUTS = {
    "one document from the start": SequenceLayout.from_lengths([5, 9, 4], [0]),
    "starts at every cut": SequenceLayout.from_lengths([5, 9, 4], [0, 5, 14]),
    "at some cuts": SequenceLayout.from_lengths([5, 9, 4, 6], [5, 18]),
    "one token each": SequenceLayout.from_lengths([3, 0, 5, 1], range(9)),
    "over five ranks": SequenceLayout.from_lengths([6, 4, 0, 3, 2, 7], [2, 17, 20]),
    "two over each cut": SequenceLayout.from_lengths([6, 6, 6], [0, 1, 4, 9, 10, 16]),
    "first and last ranks empty": SequenceLayout.from_lengths([0, 7, 0, 5, 0], [3, 8]),
    "chunks and blocks": SequenceLayout.from_lengths([300, 70, 190], [0, 129, 130, 290, 350, 500]),
    "one rank": SequenceLayout.from_lengths([40], [0, 7, 8]),
}


@st.composite
def layouts(draw: st.DrawFn) -> SequenceLayout:
    """1 to 6 ranks with 0 to 80 tokens each, and documents that often start at cuts."""
    lengths = draw(st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(lambda x: sum(x) > 0))
    cuts = [c for c in SequenceLayout.from_lengths(lengths).cuts if c < sum(lengths)]
    starts = draw(st.sets(st.sampled_from(cuts) | st.integers(0, sum(lengths) - 1), min_size=1, max_size=12))
    return SequenceLayout.from_lengths(lengths, sorted(starts))


def _attend(comm: Communicator | None, inputs: Inputs, layout: SequenceLayout, causal: bool):
    """Outputs, final state and gradients of this rank's slice; of the whole sequence when there is no communicator."""
    start, stop = (0, layout.total) if comm is None else layout.range(comm.rank)
    ops = LocalSequenceOps(layout.documents) if comm is None else ShardedSequenceOps(comm, layout)
    leaves = inputs.leaves(start, stop)
    (q, k, v), kwargs = leaves.arguments()
    out, after = ops.linear_attention(q, k, v, causal=causal, **kwargs)
    weights = torch.randn(2, 3, layout.total, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (out * weights[:, :, start:stop].to(out.dtype)).sum()
    if kwargs["state"] is not None:
        # The final state is replicated: exactly one rank counts it in the loss.
        share = 1.0 if comm is None or comm.rank == comm.size - 1 else 0.0
        loss = loss + share * weighted_sum(*after.tensors()[:4])
    loss.backward()
    return out.detach(), [t.detach() for t in after.tensors()], leaves.gradients()


def _check_attention(
    kind: Kind,
    layout: SequenceLayout,
    causal: bool,
    gate: bool,
    scale: bool,
    state: bool,
    dtype: torch.dtype = torch.float64,
) -> None:
    inputs = Inputs.random(layout.total, layout.total, gate=gate, scale=scale, state=state, dtype=dtype)
    want, want_state, want_grads = _attend(None, inputs, layout, causal)
    ranks = run_ranks(kind, partial(_attend, inputs=inputs, layout=layout, causal=causal), layout.size)
    assert_close(torch.cat([r[0] for r in ranks], 2), want)
    # Without a state given, only the rank of the last token is promised the final one.
    holders = ranks if state else [ranks[layout.ranks_of_last_document()[-1]]]
    for _, after, _ in holders:
        for got, field in zip(after, want_state, strict=True):
            assert_close(got, field, kind="state")
    for name, gradient in want_grads.items():
        parts = [r[2][name] for r in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=name)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("causal", "gate", "scale", "state"),
    [(True, False, False, False), (True, True, True, True), (False, False, False, True), (False, True, True, True)],
)
def test_linear_attention(layout, causal, gate, scale, state):
    """Documents over ranks equal documents on one rank: outputs, the state, every gradient."""
    _check_attention("simulated", layout, causal, gate, scale, state)


@pytest.mark.usefixtures("computed_by")
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([32, 64]))
def test_linear_attention_for_any_layout(layout, causal, gate, scale, state, bits):
    """So they do however ranks and documents lie, with any of the options, in float64 and float32."""
    dtype = torch.float64 if bits == 64 else torch.float32
    _check_attention("simulated", layout, causal, gate, scale, state and bits == 64, dtype)


def test_linear_attention_over_processes():
    """The same holds over real processes joined by gloo."""
    _check_attention("gloo", SequenceLayout.from_lengths([5, 0, 9], [2, 8]), False, True, True, True)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax causal": lambda ops, x, rp: ops.softmax_attention(x, x[:, :2], x[:, :2], causal=True),
    "softmax full": lambda ops, x, rp: ops.softmax_attention(x, x, x, causal=False),
    "convolve": lambda ops, x, rp: ops.convolve(x[0], rp[0]),
    "convolve centred": lambda ops, x, rp: ops.convolve(x[0], rp[0], centred=True),
    "convolve pointwise": lambda ops, x, rp: ops.convolve(x[0], rp[0, :1], centred=True),
    "convolve streaming": lambda ops, x, rp: ops.convolve_streaming(x[0], rp[0])[0],
    "gated": lambda ops, x, rp: ops.gated_scan(x[0], -x[1].square())[0],
    "selective": lambda ops, x, rp: ops.selective_scan(
        x[0], x[1].square(), -rp[0, :3].T, x[1, ..., :3], x[0, ..., :3], skip_D=rp[0, 3]
    )[0],
}


def _check_call(call: Callable[..., torch.Tensor], layout: SequenceLayout) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, layout.total, 5, generator=g, dtype=torch.float64)
    rp = torch.rand(4, 7, 5, generator=g, dtype=torch.float64) + 0.05

    def run(ops, start: int, stop: int):
        leaves = [x[:, :, start:stop].clone().requires_grad_(), rp.clone().requires_grad_()]
        out = call(ops, *leaves)
        weights = torch.arange(start, stop, dtype=torch.float64)[:, None] + torch.arange(5.0)
        (out * weights.sin()).sum().backward()
        return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]

    want = run(LocalSequenceOps(layout.documents), 0, layout.total)

    def body(comm: Communicator):
        return run(ShardedSequenceOps(comm, layout), *layout.range(comm.rank))

    ranks = run_simulated(body, layout.size)
    assert_close(torch.cat([r[0] for r in ranks], -2), want[0])
    assert_close(torch.cat([r[1] for r in ranks], -2), want[1], kind="gradient")
    assert_close(torch.stack([r[2] for r in ranks]).sum(0), want[2], kind="gradient")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", CALLS)
def test_every_other_operation(name, layout):
    """Every operation on documents over ranks equals that on one rank, with its gradients."""
    _check_call(CALLS[name], layout)


@examples(30)
@given(st.sampled_from(sorted(CALLS)), layouts())
def test_every_other_operation_for_any_layout(name, layout):
    """So it does however ranks and documents lie."""
    _check_call(CALLS[name], layout)


@pytest.mark.parametrize("name", ["softmax causal", "softmax full"])
def test_documents_by_ring_attention(name):
    """The ring gives documents what the reshuffle gives them."""
    layout = LAYOUTS["two over each cut"]
    x = torch.randn(1, 4, layout.total, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = CALLS[name](LocalSequenceOps(layout.documents), x, None)

    def body(comm: Communicator):
        part = x[:, :, slice(*layout.range(comm.rank))]
        return CALLS[name](ShardedSequenceOps(comm, layout, softmax="ring"), part, None)

    assert_close(torch.cat(run_simulated(body, layout.size), 2), want)


@pytest.mark.parametrize(("layout", "taps", "given_tail"), each_pair(LAYOUTS.values(), (1, 2, 7), (True, False)))
def test_the_tail_of_a_convolution(layout, taps, given_tail):
    """Every rank gets the last document's tail where one was given; else the rank of the last token has it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, layout.total, 3, generator=g, dtype=torch.float64)
    w, tail = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((taps, 3), (2, taps - 1, 3)))
    tail = tail if given_tail else None
    _, want = LocalSequenceOps(layout.documents).convolve_streaming(x, w, tail)

    def body(comm: Communicator):
        part = x[:, slice(*layout.range(comm.rank))]
        return ShardedSequenceOps(comm, layout).convolve_streaming(part, w, tail)[1]

    tails = run_simulated(body, layout.size)
    holders = range(layout.size) if given_tail else [layout.ranks_of_last_document()[-1]]
    assert all(torch.equal(tails[rank], want) for rank in holders)


def _traffic(layout: SequenceLayout, name: str) -> list[list[str]]:
    """What each rank calls in a forward and a backward pass."""
    x = torch.rand(2, 4, layout.total, 5, generator=torch.Generator().manual_seed(0))
    rp = torch.rand(4, 7, 5, generator=torch.Generator().manual_seed(1))

    def body(comm: Communicator):
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        leaf = x[:, :, slice(*layout.range(comm.rank))].clone().requires_grad_()
        if name.startswith("linear"):
            ops.linear_attention(leaf, leaf, leaf, causal="causal" in name)[0].sum().backward()
        else:
            CALLS[name](ops, leaf, rp).sum().backward()
        return comm.traffic.order()

    return run_simulated(body, layout.size)


@pytest.mark.parametrize("name", ["linear causal", "linear full", *CALLS])
def test_no_document_over_a_cut_no_message(name):
    """Where every document lies on one rank, no rank calls any exchange, forward or backward."""
    assert _traffic(LAYOUTS["starts at every cut"], name) == [[], [], []]
    assert _traffic(LAYOUTS["one token each"], name) == [[], [], [], []]


def test_a_state_goes_where_its_document_goes():
    """A document over two of three ranks is one message of 4 B H (M (V + 1) + 2) bytes, from the one to the other."""
    layout = SequenceLayout.from_lengths([50, 60, 40], [0, 30, 80, 110])

    def body(comm: Communicator) -> tuple[int, int, int]:
        x = torch.rand(2, 3, layout.lengths[comm.rank], 5)
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        ops.linear_attention(x, x, x)
        return comm.traffic.bytes_sent, comm.traffic.bytes_received, comm.traffic.messages

    message = 4 * 2 * 3 * (5 * (5 + 1) + 2)
    assert run_simulated(body, 3) == [(message, 0, 1), (0, message, 0), (0, 0, 0)]


@pytest.mark.parametrize("name", ["linear causal", "linear full", *CALLS])
def test_no_bit_of_another_document_shows(name):
    """Over ranks too, a token that changes leaves outputs and gradients of all other documents bitwise the same."""
    layout = SequenceLayout.from_lengths([70, 0, 100, 30, 40], [0, 60, 150, 151, 220])
    rp = torch.rand(4, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.05

    def body(comm: Communicator, x: torch.Tensor):
        ops = ShardedSequenceOps(comm, layout)
        leaf = x[:, :, slice(*layout.range(comm.rank))].clone().requires_grad_()
        if name.startswith("linear"):
            gate = -leaf[..., 0].square()
            out, _ = ops.linear_attention(leaf, leaf.square(), leaf, log_gate_BHS=gate, causal="causal" in name)
        else:
            out = CALLS[name](ops, leaf, rp)
        (out * torch.arange(5.0).sin()).sum().backward()
        return out.detach(), leaf.grad

    results = []
    for value in (0.0, 2.0):
        x = torch.randn(2, 4, layout.total, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[:, :, 100] += value
        ranks = run_simulated(partial(body, x=x), layout.size)
        results.append([torch.cat([r[i] for r in ranks], -2) for i in (0, 1)])
    others = [t for t in range(layout.total) if not 60 <= t < 150]
    assert not torch.equal(results[0][0][..., 60:150, :], results[1][0][..., 60:150, :])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[..., others, :], after[..., others, :])
    if "causal" in name:
        assert torch.equal(results[0][0][..., 60:100, :], results[1][0][..., 60:100, :])


def test_ten_thousand_documents_of_one_token_over_ranks():
    """Every token attends to itself alone, without a message, through every attention."""
    layout = SequenceLayout.even(10_000, 3, documents=range(10_000))
    x = torch.randn(1, 1, 10_000, 4, generator=torch.Generator().manual_seed(0))

    def body(comm: Communicator) -> torch.Tensor:
        ops, part = ShardedSequenceOps(comm, layout), x[:, :, slice(*layout.range(comm.rank))]
        comm.traffic.clear()
        outs = [
            ops.linear_attention(part.square() + 1, part.square() + 1, part)[0],
            ops.linear_attention(part.square() + 1, part.square() + 1, part, causal=False)[0],
            ops.softmax_attention(part, part, part, causal=True),
        ]
        assert comm.traffic.calls == 0
        return torch.stack(outs)

    for out in torch.cat(run_simulated(body, 3), 3).unbind(0):
        assert_close(out, x)


def test_what_takes_no_documents_says_so():
    """Operations of one unbroken sequence, and a memory on a layout of its own, are refused with documents."""
    layout = SequenceLayout.from_lengths([3, 4], [0, 2])
    memory = SequenceLayout.from_lengths([4, 3], [0, 2])

    def body(comm: Communicator) -> None:
        ops, x = ShardedSequenceOps(comm, layout), torch.zeros(1, 1, layout.lengths[comm.rank], 2)
        with pytest.raises(InputError, match="one unbroken sequence"):
            ops.run(RunningSumCall(x[0]))
        y = torch.zeros(1, 1, memory.lengths[comm.rank], 2)
        with pytest.raises(InputError, match="queries and keys lie on one layout"):
            ShardedSequenceOps(comm, layout, memory).linear_attention(x, y, y, causal=False)

    assert run_simulated(body, 2) == [None, None]
