"""deterministic=True: the same bits for any number of ranks, forward and backward, with gates that hide nothing."""

import hashlib
from functools import partial

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel
from dist_attn.ops import KeyValueCache, LinearState, linear_attention
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.ops.whole_vectors import RowBlocks
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.in_turn import in_turn
from dist_attn.sharded.linear import attention_in_turn
from dist_attn.sharded.sharding import Sharding
from tests.support.attention import Inputs
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model
from tests.support.native import needs_kernels
from tests.support.ranks import run_ranks

TOKENS = 64 * 9 + 13
LAYOUTS = [
    *(SequenceLayout.even(TOKENS, ranks, 64) for ranks in (1, 2, 3, 4)),
    SequenceLayout((0, 64, 64, 512, TOKENS, TOKENS)),
]


def inputs(*, gate: bool) -> Inputs:
    """float32, with gates so weak that everything before still counts at the end."""
    case = Inputs.random(TOKENS, TOKENS, gate=gate, scale=gate, state=True, dtype=torch.float32)
    if gate:
        case.sequence["log_gate"] = case.sequence["log_gate"] * 1e-3
    return case


def on_a_rank(comm: Communicator, case: Inputs, layout: SequenceLayout, causal: bool, gradients: bool):
    """Outputs, the last state and the gradients of one rank's slice."""
    leaves = case.leaves(*layout.range(comm.rank))
    qkv, kwargs = leaves.arguments()
    ops = ShardedSequenceOps(comm, layout, deterministic=True)
    with torch.set_grad_enabled(gradients):
        out, after = ops.linear_attention(*qkv, causal=causal, **kwargs)
    if not gradients:
        return out, after.tensors()[:4], {}
    share = float(comm.rank == 0)
    (out.square().sum() + share * sum(t.square().sum() for t in after.tensors()[:4])).backward()
    return out.detach(), [t.detach() for t in after.tensors()[:4]], leaves.gradients()


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_the_same_bits_for_any_number_of_ranks(gate, causal, gradients):
    """Outputs, states and the gradients of what is cut are bitwise those of one rank; shared gradients are close."""
    case = inputs(gate=gate)
    found = []
    for layout in LAYOUTS:
        body = partial(on_a_rank, case=case, layout=layout, causal=causal, gradients=gradients)
        ranks = run_simulated(body, layout.size)
        grads = {
            name: torch.cat([r[2][name] for r in ranks], 2)
            if name in case.sequence
            else torch.stack([r[2][name] for r in ranks]).sum(0)
            for name in ranks[0][2]
        }
        found.append((torch.cat([r[0] for r in ranks], 2), [r[1] for r in ranks], grads))
    want, (want_after, *_), want_grads = found[0]
    for out, afters, grads in found[1:]:
        assert_close(out, want, kind="exact")
        for after in afters:
            for got, field in zip(after, want_after, strict=True):
                assert_close(got, field, kind="exact")
        for name, gradient in grads.items():
            kind = "exact" if name in case.sequence and causal else "gradient"
            assert_close(gradient, want_grads[name], kind=kind, what=name)


@pytest.mark.parametrize("lengths", [(64, 0, 832, 128), (0, 0, 1024, 0), (512, 512, 0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_ranks_without_tokens_have_all_gradients(lengths, causal):
    """Every input of every rank has a gradient, of no elements where it has no tokens, and they are one rank's."""
    case = Inputs.random(1024, 1024, gate=True, scale=True, state=True)

    def body(comm: Communicator, layout: SequenceLayout) -> tuple[torch.Tensor, ...]:
        leaves = case.leaves(*layout.range(comm.rank))
        qkv, kwargs = leaves.arguments()
        out, _ = ShardedSequenceOps(comm, layout, deterministic=True).linear_attention(*qkv, causal=causal, **kwargs)
        return torch.autograd.grad(out.square().sum(), list(leaves.sequence.values()))

    def gradients(layout: SequenceLayout) -> list[torch.Tensor]:
        ranks = run_simulated(partial(body, layout=layout), layout.size)
        return [torch.cat(parts, 2) for parts in zip(*ranks, strict=True)]

    want = gradients(SequenceLayout.from_lengths([1024]))
    leaves = case.leaves()
    qkv, kwargs = leaves.arguments()
    out, _ = linear_attention(*qkv, causal=causal, **kwargs)
    fast = torch.autograd.grad(out.square().sum(), list(leaves.sequence.values()))
    got = gradients(SequenceLayout.from_lengths(lengths))
    for name, gradient, one_rank, other in zip(case.sequence, got, want, fast, strict=True):
        assert_close(gradient, one_rank, kind="gradient", what=name)
        assert_close(gradient, other, kind="gradient", what=name)


@pytest.mark.usefixtures("computed_by")
def test_it_is_linear_attention():
    """The deterministic form computes what the fast form computes, to rounding."""
    case = inputs(gate=True)
    qkv, kwargs = case.arguments()
    want, _ = linear_attention(*qkv, **kwargs)
    body = partial(on_a_rank, case=case, layout=LAYOUTS[2], causal=True, gradients=False)
    assert_close(torch.cat([r[0] for r in run_simulated(body, 3)], 2), want)


@needs_kernels
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("together", [1, 3])
def test_turns_of_heads_without_gradients_have_the_bits_of_one_rank(gate, together):
    """By C kernels, for one head after the other and for all at once; the last state but for its log decay too."""
    case = inputs(gate=gate)
    qkv, kwargs = case.arguments()
    want, want_after = linear_attention(*qkv, **kwargs)

    def body(comm: Communicator, layout: SequenceLayout) -> tuple[torch.Tensor, LinearState]:
        (q, k, v), kwargs = case.leaves(*layout.range(comm.rank)).arguments()
        gates = kwargs.pop("log_gate_BHS"), kwargs.pop("key_scale_BHS")
        with torch.no_grad():
            return attention_in_turn(Sharding(comm, layout, layout), LinearCall(q, k, v, *gates, **kwargs), together)

    for layout in LAYOUTS:
        ranks = run_simulated(partial(body, layout=layout), layout.size)
        assert_close(torch.cat([out for out, _ in ranks], 2), want, kind="exact")
        for _, after in ranks:
            *exact, log_decay_BH, _ = zip(after.tensors(), want_after.tensors(), strict=True)
            assert_close(*log_decay_BH)
            for got, field in exact:
                assert_close(got, field, kind="exact")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_absorb_the_first_heads_for_the_next_one(ranks):
    """Their outputs come last, but from the last rank, which nobody waits for."""

    def body(comm: Communicator) -> list[str]:
        done = []

        def absorb(some: slice, before_BHX: torch.Tensor) -> torch.Tensor:
            done.append(f"absorb {some.start}")
            return before_BHX + 1

        def work(some: slice, before_BHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            done.append(f"work {some.start}")
            return before_BHX + 10 * comm.rank, before_BHX + 1

        first_BHX, join = torch.arange(3.0)[None, :, None], partial(torch.cat, dim=1)
        before, out, after = in_turn(comm, first_BHX, 1, work, join, absorb=absorb, when_there=lambda fill: fill())
        assert torch.equal(before, first_BHX + comm.rank) and torch.equal(out, first_BHX + 11 * comm.rank)
        assert torch.equal(after, first_BHX + ranks)
        return done

    *others, last = run_simulated(body, ranks)
    assert last == ["work 0", "work 1", "work 2"]
    assert others == [["absorb 0", "work 1", "work 2", "work 0"]] * (ranks - 1)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_without_gradients_has_the_bits_of_one_rank(layout):
    """What comes next rounds outputs to bfloat16, so that ranks take turns of their own accord, few heads or many."""
    case = inputs(gate=True)

    def body(comm: Communicator, layout: SequenceLayout) -> torch.Tensor:
        qkv, kwargs = case.leaves(*layout.range(comm.rank)).arguments()
        with torch.no_grad():
            return ShardedSequenceOps(comm, layout).linear_attention(*(x.bfloat16() for x in qkv), **kwargs)[0]

    whole, cut = (torch.cat(run_simulated(partial(body, layout=x), x.size), 2) for x in (LAYOUTS[0], layout))
    assert_close(cut, whole, kind="exact")


@needs_kernels
def test_turns_are_for_c_kernels(monkeypatch):
    """By other kernels asked for by name ranks scan, whatever they were told of C kernels before."""
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layout, x = SequenceLayout.from_lengths([8, 0]), torch.ones(1, 8, 8, 4)

    def body(comm: Communicator) -> list[int]:
        found = []
        for implementation in ("auto", "triton", "auto"):
            ops = ShardedSequenceOps(comm, layout, implementation=implementation)
            own = x[:, :, slice(*layout.range(comm.rank))]
            comm.traffic.clear()
            with torch.no_grad():
                ops.linear_attention(own, own, own)
            found.append([event.phase for event in comm.traffic.events if event.label == "carry"].count("launch"))
        return found

    # One turn and what the last rank sends, or a swap.
    assert run_simulated(body, 2) == [[2, 1, 2]] * 2


@pytest.mark.usefixtures("computed_by")
def test_the_fast_form_does_differ():
    """With such gates the fold over ranks is not bitwise that of one rank: the test above would notice."""
    case = inputs(gate=True)

    def body(comm: Communicator, layout: SequenceLayout) -> torch.Tensor:
        qkv, kwargs = case.leaves(*layout.range(comm.rank)).arguments()
        with torch.no_grad():
            return ShardedSequenceOps(comm, layout).linear_attention(*qkv, **kwargs)[0]

    whole, cut = (torch.cat(run_simulated(partial(body, layout=x), x.size), 2) for x in (LAYOUTS[0], LAYOUTS[3]))
    assert not torch.equal(whole, cut)


def model_of(kind: str) -> LanguageModel:
    """A small model with a short convolution."""
    mixer = {"kind": kind, "hidden_size": 16, "num_heads": 2, "num_random": 8, "short_convolution": 3}
    return small_model(small_config(kind).model_validate({**small_config(kind).model_dump(), "mixer": mixer}))


def hidden(comm: Communicator, kind: str, layouts: list[SequenceLayout]) -> tuple[torch.Tensor, list[str]]:
    """Hidden states of two blocks of tokens, and hashes of the state after them."""
    model = model_of(kind)
    tokens = torch.arange(sum(layout.total for layout in layouts))[None] * 7 % 251
    state, parts, done = None, [], 0
    with torch.no_grad(), RowBlocks():
        for layout in layouts:
            ops = ShardedSequenceOps(comm, layout, deterministic=True)
            start, stop = layout.range(comm.rank)
            h_BLD, state = model.hidden(tokens[:, done + start : done + stop], ops, state)
            done += layout.total
            parts.append(h_BLD)
    hashes = [hashlib.sha256(t.numpy().tobytes()).hexdigest() for s in state.layers for t in s.tensors()]
    return torch.cat(parts, 1), hashes


@pytest.mark.parametrize("mixer", ["rfa", "rfa_gate"])
def test_a_whole_model(mixer):
    """Every hidden state and every state of a model has the same bits on 1, 2, 3 and 4 ranks."""
    want = None
    for ranks in (1, 2, 3, 4):
        layout = SequenceLayout.even(64 * 5 + 7, ranks, 64)
        found = run_simulated(partial(hidden, kind=mixer, layouts=[layout]), ranks)
        got = torch.cat([h for h, _ in found], 1)
        want = (got, found[0][1]) if want is None else want
        assert_close(got, want[0], kind="exact")
        assert all(hashes == want[1] for _, hashes in found)


def test_a_whole_model_over_processes():
    """Processes over gloo give the bits of one simulated rank, also where the sequence comes in two blocks."""
    first, second = (SequenceLayout.even(n, 3, 64) for n in (192, 64 + 7))
    alone = [SequenceLayout.from_lengths([192 + 64 + 7])]
    (want, hashes), *_ = run_simulated(partial(hidden, kind="rfa_gate", layouts=alone), 1)
    found = run_ranks("gloo", partial(hidden, kind="rfa_gate", layouts=[first, second]), 3)
    blocks = [h.split([layout.lengths[rank] for layout in (first, second)], 1) for rank, (h, _) in enumerate(found)]
    assert_close(torch.cat([part for block in zip(*blocks, strict=True) for part in block], 1), want, kind="exact")
    assert all(got == hashes for _, got in found)


def test_cuts_off_the_grid_are_refused():
    """A cut inside a chunk is refused with the layout that would do, on every rank."""
    with pytest.raises(ShapeError, match=r"a cut at token 65.*multiples of 64"):
        run_simulated(lambda comm: ShardedSequenceOps(comm, SequenceLayout((0, 65, 200)), deterministic=True), 2)


def test_operations_without_the_promise_are_refused():
    """Operations that mix in another way say that they cannot promise the same bits."""

    def body(comm: Communicator) -> None:
        layout, memory_layout = SequenceLayout((0, 64, 128)), SequenceLayout((0, 128, 192))
        ops = ShardedSequenceOps(comm, layout, deterministic=True)
        elsewhere = ShardedSequenceOps(comm, layout, memory_layout, deterministic=True)
        x, modes = torch.zeros(1, 64, 2), torch.zeros(2, 2, dtype=torch.complex64)
        heads = x[:, None]
        keys = torch.zeros(1, 1, memory_layout.lengths[comm.rank], 2)
        calls = (
            lambda: ops.linear_attention(heads, heads, heads, causal=True, prefix=5),
            lambda: elsewhere.linear_attention(heads, keys, keys, causal=True),
            lambda: ops.sum_over_sequence(x),
            lambda: ops.softmax_attention(heads, heads, heads, causal=True),
            lambda: ops.softmax_attention_streaming(
                heads, heads, heads, KeyValueCache(heads[:, :, :0], heads[:, :, :0])
            ),
            lambda: ops.gated_scan(x, x),
            lambda: ops.selective_scan(x, x, modes.real, x, x),
        )
        for call in calls:
            with pytest.raises(InputError, match="cannot promise the same bits"):
                call()

    run_simulated(body, 2)


@pytest.mark.parametrize("tokens", [0, 1, 64, 200])
def test_linear_layers_in_blocks(tokens):
    """In blocks a linear layer gives what it gives at once, with gradients, for any number of tokens."""
    layer = torch.nn.Linear(6, 5).double()
    x = torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    with RowBlocks():
        got = layer(x)
    assert_close(got, layer(x))
    (grad,) = torch.autograd.grad(got.square().sum(), x)
    assert_close(grad, torch.autograd.grad(layer(x).square().sum(), x)[0], kind="gradient")
    with RowBlocks():
        assert layer(torch.zeros(6, dtype=torch.float64)).shape == (5,)
