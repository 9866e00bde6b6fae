"""Sharded = unsharded for the papers' operations: any sizes over any cut, and what each sends."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops import (
    LegsState,
    dense_scan,
    diagonal_scan,
    fourier_mix,
    legs_memory,
    long_convolve,
    mix_tokens,
)
from tests.sharded.test_operations import ANY, CUTS
from tests.support.sharded_call import check_sharded, random_tensor

W = random_tensor(14, 3, seed=1)
MODES = torch.full((3, 2), 0.5 + 0.5j, dtype=torch.complex128)
ON_TOKENS = {
    "long_convolve": lambda ops, t: (long_convolve(t[0], W, ops=ops),),
    "diagonal_scan": lambda ops, t: diagonal_scan(t[0], MODES, MODES, MODES, ops=ops),
    "mix_tokens": lambda ops, t: (mix_tokens(t[0], W, W.T, ops=ops),),
    "fourier_mix": lambda ops, t: (fourier_mix(t[0], ops=ops),),
}


@pytest.mark.parametrize("name", ON_TOKENS)
def test_an_empty_batch(name):
    """No sequences in, no outputs out, forward and backward."""
    x = torch.zeros(0, 14, 3, dtype=torch.float64)
    check_sharded(ON_TOKENS[name], SequenceLayout.from_lengths((5, 0, 9)), [x])


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
            "long_convolve": (lambda u: long_convolve(u, w[:, :channels], ops=ops), reshuffle + back),
            "mix_tokens": (lambda u: mix_tokens(u, w, w.T, ops=ops), sums),
            "diagonal_scan": (
                lambda u: diagonal_scan(u, a, a, a, ops=ops)[0],
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


@ANY
@given(lengths=CUTS, taps=st.sampled_from([1, 3, 400]), channels=st.integers(1, 5))
def test_long_convolution(lengths, taps, channels):
    """Both kernels over ranks equal one rank's, fewer channels than ranks and kernels of any length, all gradients."""
    check_sharded(
        lambda ops, t: (long_convolve(t[0], t[1], backward_kernel_LD=t[2], ops=ops),),
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
        return diagonal_scan(u, a / (a.abs() + 0.05), b, c, state=x if given_state else None, ops=ops)

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
        y_BLDM, after = dense_scan(u, 0.3 * a, b, c, state=x if given_state else None, ops=ops)
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
        y_BLD, after = legs_memory(f, read, state=state, ops=ops)
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
        return (mix_tokens(x, w_in, w_out, **dict(zip(("bias_in_S", "bias_out_L"), bias, strict=False)), ops=ops),)

    total = sum(lengths)
    weights = [random_tensor(total, 6, seed=1), random_tensor(6, total, seed=2)]
    if biases:
        weights += [random_tensor(6, seed=3), random_tensor(total, seed=4)]
    check_sharded(
        call, SequenceLayout.from_lengths(lengths), [random_tensor(2, total, channels, seed=0)], whole=weights
    )


@ANY
@given(lengths=CUTS, size=st.integers(1, 6), norm=st.sampled_from([None, "ortho"]))
def test_fourier_mix(lengths, size, norm):
    """Fourier mixing over ranks equals one rank's for any length and width, with its gradient."""
    x = random_tensor(2, sum(lengths), size, seed=0)
    check_sharded(lambda ops, t: (fourier_mix(t[0], norm=norm, ops=ops),), SequenceLayout.from_lengths(lengths), [x])


@pytest.mark.parametrize("hidden", [6, 2_000])
def test_token_mixing_sends_the_same_at_any_length(hidden):
    """Each way an all-reduce of B S D numbers, in one step or two, whatever the length and however it is cut."""

    def body(comm: Communicator, layout: SequenceLayout) -> tuple[int, int]:
        x = torch.zeros(2, layout.lengths[comm.rank], 3, dtype=torch.float64, requires_grad=True)
        w = torch.zeros(layout.total, hidden, dtype=torch.float64)
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        y = mix_tokens(x, w, w.T, ops=ops)
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
            mix_tokens(torch.zeros(1, layout.lengths[comm.rank], 4), w, w.T, activation=activation, ops=ops)
        return comm.traffic.bytes_sent

    assert run_simulated(body, 3) == [0] * 3


@pytest.mark.parametrize("size", [4, 5])
def test_the_half_spectrum_is_all_that_travels(size):
    """Both all-to-alls of Fourier mixing carry 2 L (D // 2 + 1) (P - 1) / P elements per batch element and rank."""
    layout = SequenceLayout.from_lengths([6, 6, 6])
    x = random_tensor(1, 18, size, seed=0)

    def body(comm: Communicator) -> int:
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        fourier_mix(x[:, slice(*layout.range(comm.rank))], ops=ops)
        return comm.traffic.bytes_sent

    assert sum(run_simulated(body, 3)) == 2 * 8 * 2 * 18 * (size // 2 + 1) * 2 // 3
