"""Sharded = unsharded for operations with more in view than a state: any sizes over any cut, and what each sends."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LegsState, LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.examples import examples
from tests.support.sharded_call import check_sharded, random_tensor

CUTS = st.lists(st.sampled_from([0, 1, 2, 6, 17, 70]), min_size=1, max_size=5)
ANY = examples(25)


@ANY
@given(lengths=CUTS, taps=st.sampled_from([1, 3, 400]), channels=st.integers(1, 5))
def test_long_convolution(lengths, taps, channels):
    """Both kernels over ranks equal one rank's, fewer channels than ranks and kernels of any length, all gradients."""
    check_sharded(
        lambda ops, t: (ops.long_convolve(t[0], t[1], backward_kernel_LD=t[2]),),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), channels, seed=0)],
        whole=[random_tensor(taps, channels, seed=1), random_tensor(taps, channels, seed=2)],
    )


@ANY
@given(lengths=CUTS, given_state=st.booleans())
def test_diagonal_scan(lengths, given_state):
    """The recurrence over ranks equals one rank's: outputs, the final state on every rank, all gradients."""

    def call(ops, t):
        u, a, b, c, x = t[0], *(torch.view_as_complex(part) for part in t[1:])
        return ops.diagonal_scan(u, a / (a.abs() + 0.05), b, c, state=x if given_state else None)

    check_sharded(
        call,
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
        whole=[*(random_tensor(3, 4, 2, seed=s) for s in (1, 2, 3)), random_tensor(2, 3, 4, 2, seed=4)],
    )


@ANY
@given(lengths=CUTS, given_state=st.booleans())
def test_dense_scan(lengths, given_state):
    """The recurrence with a full matrix over ranks equals one rank's: outputs, every rank's state, all gradients."""

    def call(ops, t):
        u, a, b, c, x = t
        y_BLDM, after = ops.dense_scan(u, 0.3 * a, b, c, state=x if given_state else None)
        return y_BLDM.flatten(2), after

    check_sharded(
        call,
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
        whole=[random_tensor(*shape, seed=s) for s, shape in enumerate([(3, 4, 4), (3, 4), (3, 2, 4), (2, 3, 4)], 1)],
    )


@ANY
@given(lengths=CUTS, given_state=st.booleans())
def test_legs_memory(lengths, given_state):
    """The memory over ranks equals one rank's: what is read, every rank's state, all gradients, at other positions."""

    def call(ops, t):
        f, read, c = t
        state = LegsState(c, torch.tensor([3, 1000])) if given_state else None
        y_BLD, after = ops.legs_memory(f, read, state=state)
        return y_BLD, after.c_BDN, after.seen_B

    check_sharded(
        call,
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), 3, seed=0)],
        whole=[random_tensor(3, 6, seed=1), random_tensor(2, 3, 6, seed=2)],
    )


@ANY
@given(lengths=CUTS, channels=st.integers(1, 4), biases=st.booleans())
def test_token_mixing(lengths, channels, biases):
    """The token MLP over ranks equals one rank's, with the gradients of its weights as shares that add up."""

    def call(ops, t):
        x, w_in, w_out, *bias = t
        return (ops.mix_tokens(x, w_in, w_out, **dict(zip(("bias_in_S", "bias_out_L"), bias, strict=False))),)

    total = sum(lengths)
    weights = [random_tensor(total, 6, seed=1), random_tensor(6, total, seed=2)]
    if biases:
        weights += [random_tensor(6, seed=3), random_tensor(total, seed=4)]
    check_sharded(
        call, SequenceLayout.from_lengths(lengths), [random_tensor(2, total, channels, seed=0)], whole=weights
    )


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
        lambda ops, t: (ops.relative_attention(t[0].exp(), t[1].exp(), t[2], t[3].exp(), causal=causal),),
        SequenceLayout.from_lengths(lengths),
        [q, k, random_tensor(2, 3, total, 4, seed=2)],
        whole=[rp],
    )


@ANY
@given(lengths=CUTS, size=st.integers(1, 6), norm=st.sampled_from([None, "ortho"]))
def test_fourier_mix(lengths, size, norm):
    """Fourier mixing over ranks equals one rank's for any length and width, with its gradient."""
    x = random_tensor(2, sum(lengths), size, seed=0)
    check_sharded(lambda ops, t: (ops.fourier_mix(t[0], norm=norm),), SequenceLayout.from_lengths(lengths), [x])


W = random_tensor(14, 3, seed=1)
MODES = torch.full((3, 2), 0.5 + 0.5j, dtype=torch.complex128)
RP = random_tensor(3, 5, 3, seed=1).exp()
ON_TOKENS = {
    "long_convolve": lambda ops, t: (ops.long_convolve(t[0], W),),
    "diagonal_scan": lambda ops, t: ops.diagonal_scan(t[0], MODES, MODES, MODES),
    "mix_tokens": lambda ops, t: (ops.mix_tokens(t[0], W, W.T),),
    "fourier_mix": lambda ops, t: (ops.fourier_mix(t[0]),),
}
ON_HEADS = {
    "relative causal": lambda ops, t: (ops.relative_attention(t[0], t[0], t[0], RP, causal=True),),
    "relative full": lambda ops, t: (ops.relative_attention(t[0], t[0], t[0], RP, causal=False),),
    "softmax": lambda ops, t: (ops.softmax_attention(t[0], t[0], t[0], causal=True),),
}


@pytest.mark.parametrize("name", [*ON_TOKENS, *ON_HEADS])
def test_an_empty_batch(name):
    """No sequences in, no outputs out, forward and backward."""
    x = torch.zeros(*((0, 3, 14, 3) if name in ON_HEADS else (0, 14, 3)), dtype=torch.float64)
    check_sharded((ON_TOKENS | ON_HEADS)[name], SequenceLayout.from_lengths((5, 0, 9)), [x])


@pytest.mark.parametrize("lengths", [(3, 0, 5), (20, 30, 50)])
def test_bytes_sent(lengths):
    """What every rank sends is what the formulas say, to the byte, forward and backward."""
    layout, channels, modes = SequenceLayout.from_lengths(lengths), 4, 5
    x = random_tensor(2, layout.total, channels, seed=0)
    w = random_tensor(layout.total, 6, seed=1)

    def body(comm: Communicator) -> None:
        ops, own = ShardedSequenceOps(comm, layout), slice(*layout.range(comm.rank))
        a = torch.full((channels, modes), 0.3 + 0.1j, dtype=torch.complex128)
        reshuffle = costs.reshuffle_bytes(lengths, channels, 2 * 8, comm.rank)
        back = costs.reshuffle_back_bytes(lengths, channels, 2 * 8, comm.rank)
        sums = costs.all_reduce_bytes(2 * 6 * channels, 8, layout.size)
        calls = {
            "long_convolve": (lambda u: ops.long_convolve(u, w[:, :channels]), reshuffle + back),
            "mix_tokens": (lambda u: ops.mix_tokens(u, w, w.T), sums),
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
            "diagonal_scan": (
                lambda u: ops.diagonal_scan(u, a, a, a)[0],
                costs.all_gather_bytes(8 * (2 * 2 * channels * modes + 2), layout.size),
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


@pytest.mark.parametrize("hidden", [6, 2_000])
def test_token_mixing_sends_the_same_at_any_length(hidden):
    """Each way an all-reduce of B S D numbers, in one step or two, whatever the length and however it is cut."""

    def body(comm: Communicator, layout: SequenceLayout) -> tuple[int, int]:
        x = torch.zeros(2, layout.lengths[comm.rank], 3, dtype=torch.float64, requires_grad=True)
        w = torch.zeros(layout.total, hidden, dtype=torch.float64)
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        y = ops.mix_tokens(x, w, w.T)
        forward = comm.traffic.bytes_sent
        y.sum().backward()
        return forward, comm.traffic.bytes_sent - forward

    want = costs.all_reduce_bytes(2 * hidden * 3, 8, 3)
    for lengths in ((3, 0, 5), (40, 1, 70)):
        assert run_simulated(partial(body, layout=SequenceLayout.from_lengths(lengths)), 3) == [(want, want)] * 3


@pytest.mark.parametrize(("rows", "activation", "words"), [(9, "gelu", "for 8 tokens"), (8, "swish", "'swish'")])
def test_what_token_mixing_refuses_it_refuses_on_every_rank(rows, activation, words):
    """Weights of another length and an unknown activation are refused before anything is sent, empty ranks included."""
    layout = SequenceLayout.from_lengths((3, 0, 5))

    def body(comm: Communicator) -> int:
        ops, w = ShardedSequenceOps(comm, layout), torch.zeros(rows, 2)
        comm.traffic.clear()
        with pytest.raises((ShapeError, InputError), match=words):
            ops.mix_tokens(torch.zeros(1, layout.lengths[comm.rank], 4), w, w.T, activation=activation)
        return comm.traffic.bytes_sent

    assert run_simulated(body, 3) == [0] * 3


@pytest.mark.parametrize("causal", [True, False])
def test_relative_attention_keeps_its_precision_under_autocast(causal):
    """Under bf16 autocast, relative attention keeps the bits it has without, on one rank and over several."""
    layout = SequenceLayout.from_lengths([20, 50])
    x, rp = random_tensor(1, 2, 70, 6, seed=0).exp().float(), random_tensor(2, 9, 6, seed=1).exp().float()

    def run(comm: Communicator, enabled: bool) -> list[torch.Tensor]:
        start, stop = layout.range(comm.rank)
        part = x[:, :, start:stop]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole = LocalSequenceOps().relative_attention(x, x, x, rp, causal=causal)
            return [whole, ShardedSequenceOps(comm, layout).relative_attention(part, part, part, rp, causal=causal)]

    for without, under in zip(*(run_simulated(lambda c, e=e: run(c, e), 2) for e in (False, True)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without, under, strict=True))


@pytest.mark.parametrize("size", [4, 5])
def test_the_half_spectrum_is_all_that_travels(size):
    """Both all-to-alls of Fourier mixing carry 2 L (D // 2 + 1) (P - 1) / P elements per batch element and rank."""
    layout = SequenceLayout.from_lengths([6, 6, 6])
    x = random_tensor(1, 18, size, seed=0)

    def body(comm: Communicator) -> int:
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        ops.fourier_mix(x[:, slice(*layout.range(comm.rank))])
        return comm.traffic.bytes_sent

    assert sum(run_simulated(body, 3)) == 2 * 8 * 2 * 18 * (size // 2 + 1) * 2 // 3
