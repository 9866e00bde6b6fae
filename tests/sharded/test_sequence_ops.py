"""Sharded = unsharded: every operation, forward and every gradient, for uneven and empty shards."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import MismatchError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.sharding import OPERATIONS_AHEAD, Sharding
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.model_cases import small_model
from tests.support.ranks import run_ranks

LENGTHS = [(7,), (5, 9), (13, 0, 4), (1, 6, 0, 17, 3), (0, 11, 2, 2, 1), (70, 130)]


def _attend(comm: Communicator | None, inputs: Inputs, lengths: tuple[int, ...], causal: bool):
    """Outputs, final state and gradients of this rank's slice; of the whole sequence when there is no communicator."""
    layout = SequenceLayout.from_lengths(lengths)
    start, stop = (0, layout.total) if comm is None else layout.range(comm.rank)
    ops = LocalSequenceOps() if comm is None else ShardedSequenceOps(comm, layout)
    leaves = inputs.leaves(start, stop)
    (q, k, v), kwargs = leaves.arguments()
    out, after = ops.linear_attention(q, k, v, causal=causal, **kwargs)
    weights = torch.randn(2, 3, layout.total, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (out * weights[:, :, start:stop]).sum()
    # The final state is replicated: exactly one rank counts it in the loss.
    share = 1.0 if comm is None or comm.rank == comm.size - 1 else 0.0
    (loss + share * weighted_sum(*after.tensors()[:4])).backward()
    return out.detach(), [t.detach() for t in after.tensors()], leaves.gradients()


def _check_attention(kind: str, lengths: tuple[int, ...], causal: bool, gate: bool, scale: bool, state: bool) -> None:
    total = sum(lengths)
    inputs = Inputs.random(total, total, gate=gate, scale=scale, state=state)
    want, want_state, want_grads = _attend(None, inputs, lengths, causal)
    ranks = run_ranks(kind, partial(_attend, inputs=inputs, lengths=lengths, causal=causal), len(lengths))
    assert_close(torch.cat([r[0] for r in ranks], 2), want)
    for _, after, _ in ranks:
        for got, field in zip(after, want_state, strict=True):
            assert_close(got, field, kind="state")
    for name, gradient in want_grads.items():
        parts = [r[2][name] for r in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=name)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("causal", "gate", "scale", "state"),
    [(True, False, False, False), (True, True, True, True), (False, False, False, True), (False, True, True, False)],
)
def test_linear_attention(lengths, causal, gate, scale, state):
    """Linear attention over simulated ranks equals one rank: outputs, final state on every rank, all gradients."""
    _check_attention("simulated", lengths, causal, gate, scale, state)


@pytest.mark.parametrize("lengths", [(5, 9), (70, 0, 30)])
def test_linear_attention_over_processes(lengths):
    """The same holds over real processes joined by gloo."""
    _check_attention("gloo", lengths, True, True, True, True)


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(lambda x: sum(x) > 0),
    causal=st.booleans(),
    gate=st.booleans(),
    scale=st.booleans(),
    state=st.booleans(),
)
def test_linear_attention_for_any_cut(lengths, causal, gate, scale, state):
    """However a sequence is cut over 1 to 6 ranks, nothing changes."""
    _check_attention("simulated", tuple(lengths), causal, gate, scale, state)


def test_the_tail_of_a_convolution_owns_its_memory():
    """The tail that a state keeps does not hold on to the other ranks' halos."""
    layout = SequenceLayout.from_lengths([5, 4])

    def body(comm: Communicator) -> torch.Tensor:
        x = torch.ones(2, layout.lengths[comm.rank], 3)
        return ShardedSequenceOps(comm, layout).convolve_streaming(x, torch.ones(4, 3))[1]

    for tail in run_simulated(body, 2):
        assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_sum_and_positions():
    """The sum over the sequence is the global one on every rank, and positions are global."""
    lengths = (3, 0, 4)
    layout, x = SequenceLayout.from_lengths(lengths), torch.randn(2, 7, 5, dtype=torch.float64)

    def body(comm: Communicator):
        ops = ShardedSequenceOps(comm, layout)
        start, stop = layout.range(comm.rank)
        return ops.sum_over_sequence(x[:, start:stop]), ops.positions(), ops.total_length(stop - start)

    ranks = run_simulated(body, 3)
    for total, _, length in ranks:
        assert_close(total, LocalSequenceOps().sum_over_sequence(x))
        assert length == 7
    assert torch.cat([r[1] for r in ranks]).tolist() == list(range(7))


def test_cross_attention_with_the_memory_on_its_own_layout():
    """Queries and keys may be cut differently where attention is not causal."""
    inputs = Inputs.random(9, 14, gate=False, scale=False, state=False)
    (q, k, v), kwargs = inputs.arguments()
    want, _ = LocalSequenceOps().linear_attention(q, k, v, causal=False, **kwargs)
    queries, memory = SequenceLayout.from_lengths([4, 5]), SequenceLayout.from_lengths([13, 1])

    def body(comm: Communicator):
        (a, b), (c, d) = queries.range(comm.rank), memory.range(comm.rank)
        ops = ShardedSequenceOps(comm, queries, memory)
        return ops.linear_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=False, **kwargs)[0]

    assert_close(torch.cat(run_simulated(body, 2), 2), want)


def test_the_carry_message_has_the_stated_size():
    """What a rank sends is 8 B H (M (V + 1) + 2) bytes to each other rank in float64, whatever the length."""
    for length in (5, 300):
        inputs = Inputs.random(3 * length, 3 * length, gate=True, scale=True, state=False)
        layout = SequenceLayout.from_lengths([length] * 3)

        def body(comm: Communicator, inputs=inputs, layout=layout) -> int:
            (q, k, v), kwargs = inputs.leaves(*layout.range(comm.rank)).arguments()
            ops = ShardedSequenceOps(comm, layout)
            comm.traffic.clear()
            ops.linear_attention(q, k, v, **kwargs)
            return comm.traffic.bytes_sent

        assert run_simulated(body, 3) == [2 * 8 * 2 * 3 * (12 * (4 + 1) + 2)] * 3


def _layout_of_ones_own(comm: Communicator) -> tuple[int, str]:
    """What a rank hears that has made the same ops twice and then others than rank 0; the calls of the second time."""
    ShardedSequenceOps(comm, SequenceLayout.from_lengths([3, 4]))
    assert comm.traffic.calls
    comm.traffic.clear()
    ShardedSequenceOps(comm, SequenceLayout.from_lengths([3, 4]))
    calls = comm.traffic.calls
    try:
        ShardedSequenceOps(comm, SequenceLayout.from_lengths([3 + comm.rank, 5]))
    except MismatchError as error:
        return calls, str(error)
    return calls, ""


@pytest.mark.parametrize("kind", ["simulated", "gloo"])
def test_ranks_with_different_layouts_are_told(kind):
    """Every rank learns that the layouts differ before anything is computed; one that has not changed costs nothing."""
    for calls, words in run_ranks(kind, _layout_of_ones_own, 2):
        assert calls == 0
        assert "the layout and exchange of rank 0 and of rank 1 differ: cuts[1] is 3 on rank 0 and 4 on rank 1" in words


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (([3, 4], [0, 2], None), "documents[1] is 2 on rank 0 and 5 on rank 1"),
        (([3, 4], [0], None), "documents has 1 entries on rank 0 and 2 on rank 1, equal as far as both go"),
        (([3, 4], None, None), "documents[0] is none on rank 0 and 0 on rank 1 (of 1 and 2 entries)"),
        (([3, 4], [0, 5], [1, 2]), "memory_cuts[1] is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_the_first_difference_is_named(layouts, words):
    """Cuts, documents or a memory that differ are named with the entry that differs first, on every rank."""
    lengths, documents, memory = layouts
    other = SequenceLayout.from_lengths([3, 4], [0, 5])

    def body(comm: Communicator) -> str:
        layout = SequenceLayout.from_lengths(lengths, documents) if comm.rank == 0 else other
        keys = memory and SequenceLayout.from_lengths(memory if comm.rank == 0 else memory[::-1])
        with pytest.raises(MismatchError) as caught:
            ShardedSequenceOps(comm, layout, keys)
        return str(caught.value)

    assert all(words in said for said in run_simulated(body, 2))


def test_slices_and_layouts_that_do_not_fit_are_named():
    """A slice of another length and a layout for other ranks are refused before any exchange."""
    layout = SequenceLayout.from_lengths([3, 4])

    def body(comm: Communicator) -> None:
        ops, x = ShardedSequenceOps(comm, layout), torch.zeros(1, 1, 5, 2)
        with pytest.raises(ShapeError, match="was given 5 tokens in q"):
            ops.linear_attention(x, x, x)
        with pytest.raises(ShapeError, match="the layout is for 3 ranks"):
            ShardedSequenceOps(comm, SequenceLayout.from_lengths([1, 1, 1]))
        own = x[:, :, : layout.lengths[comm.rank]]
        with pytest.raises(ShapeError, match="was given 5 tokens in k"):
            ops.softmax_attention(own, x, x, causal=True)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(ShapeError, match="all three need four dimensions"):
                ops.linear_attention(own, own, own[..., 0])

    run_simulated(body, 2)


def test_a_rank_does_not_wait_for_those_behind_it():
    """Without gradients the first rank is in a second layer before the other begins; states are one rank's."""
    model, tokens, layout = small_model("gated delta rule"), torch.arange(128)[None] % 96, SequenceLayout((0, 64, 128))
    in_second_layer = threading.Event()
    with torch.inference_mode():
        _, want = model.hidden(tokens)

    def body(comm: Communicator) -> list[torch.Tensor]:
        def read() -> list[torch.Tensor]:
            ops = ShardedSequenceOps(comm, layout)
            with torch.inference_mode():
                _, state = model.hidden(tokens[:, slice(*layout.range(comm.rank))], ops)
            return [t for layer in state.layers for t in layer.tensors()]

        read()  # ranks agree on calls the first time
        comm.barrier()
        if comm.rank:
            assert in_second_layer.wait(60.0)
            return read()
        with model.blocks[1].mlp_in.register_forward_hook(lambda *_: in_second_layer.set()):
            return read()

    for found in run_simulated(body, 2):
        for got, field in zip(found, (t for layer in want.layers for t in layer.tensors()), strict=True):
            assert_close(got, field)


def test_a_rank_goes_no_further_ahead_than_a_few_operations():
    """Deferred, the oldest exchange is waited for when one too many is under way; else each at once."""

    def body(comm: Communicator) -> None:
        layout, waited = SequenceLayout((0, 8)), list[int]()
        at_once = Sharding(comm, layout, layout)
        at_once.when_there(partial(waited.append, 0))
        assert waited == [0]
        deferred = replace(at_once, late=[])
        for number in range(1, OPERATIONS_AHEAD + 3):
            deferred.when_there(partial(waited.append, number))
        assert waited == [0, 1, 2]

    run_simulated(body, 1)
