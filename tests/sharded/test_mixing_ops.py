"""Sharded = unsharded for long convolution, the diagonal recurrence and token mixing; what each of them sends."""

from functools import partial

import pytest
import torch

from dist_attn import costs
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LegsState, LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.ranks import run_ranks
from tests.support.sharded_call import check_sharded, random_tensor

LENGTHS = [(7,), (5, 9), (13, 0, 4), (1, 6, 0, 17, 3), (0, 11, 2, 2, 1), (70, 130)]


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("taps", [3, 400])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_long_convolution(lengths, taps, channels):
    """Both kernels over ranks equal one rank's, fewer channels than ranks and kernels of any length, all gradients."""
    check_sharded(
        lambda ops, t: (ops.long_convolve(t[0], t[1], backward_kernel_LD=t[2]),),
        SequenceLayout.from_lengths(lengths),
        [random_tensor(2, sum(lengths), channels, seed=0)],
        whole=[random_tensor(taps, channels, seed=1), random_tensor(taps, channels, seed=2)],
    )


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 0, 300), (130, 0, 1, 64)])
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


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 0, 200), (130, 0, 1, 64)])
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


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (0, 0, 90), (70, 0, 1, 33)])
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


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
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


@pytest.mark.parametrize("name", ["long_convolve", "diagonal_scan", "mix_tokens"])
def test_an_empty_batch(name):
    """No sequences in, no outputs out, forward and backward."""
    w = random_tensor(14, 3, seed=1)
    modes = torch.full((3, 2), 0.5 + 0.5j, dtype=torch.complex128)
    calls = {
        "long_convolve": lambda ops, t: (ops.long_convolve(t[0], w),),
        "diagonal_scan": lambda ops, t: ops.diagonal_scan(t[0], modes, modes, modes),
        "mix_tokens": lambda ops, t: (ops.mix_tokens(t[0], w, w.T),),
    }
    check_sharded(calls[name], SequenceLayout.from_lengths((5, 0, 9)), [torch.zeros(0, 14, 3, dtype=torch.float64)])


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
            "diagonal_scan": (
                lambda u: ops.diagonal_scan(u, a, a, a)[0],
                costs.diagonal_scan_bytes(2, channels, modes, layout.size, real_bytes=8),
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


def _all_of_them(comm: Communicator | None, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs and the gradient of x of this rank's slice; of the whole sequence when there is no communicator."""
    layout = SequenceLayout.from_lengths(lengths)
    own = slice(None) if comm is None else slice(*layout.range(comm.rank))
    ops = LocalSequenceOps() if comm is None else ShardedSequenceOps(comm, layout)
    x = random_tensor(2, layout.total, 3, seed=0)[:, own].clone().requires_grad_()
    w = random_tensor(layout.total, 3, seed=1)
    a = torch.full((3, 2), 0.6 + 0.5j, dtype=torch.complex128)
    q = x[:, None].exp()
    outs = [
        ops.long_convolve(x, w),
        ops.mix_tokens(x, w, w.T),
        ops.diagonal_scan(x, a, a, a)[0],
        ops.relative_attention(q, q, x[:, None], torch.ones(1, 5, 3, dtype=torch.float64), causal=False)[:, 0],
        ops.linear_attention(q, q, x[:, None], prefix=4)[0][:, 0],
    ]
    y = torch.cat(outs, dim=2)
    (y * random_tensor(*y.shape[::2], seed=2)[:, None]).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_over_processes():
    """The same holds over real processes joined by gloo, an empty slice among them."""
    lengths = (5, 0, 8)
    want = _all_of_them(None, lengths)
    ranks = run_ranks("gloo", partial(_all_of_them, lengths=lengths), len(lengths))
    for index, kind in enumerate(("output", "gradient")):
        assert_close(torch.cat([r[index] for r in ranks], 1), want[index], kind=kind)
