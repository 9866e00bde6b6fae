"""The LegS memory: the oracle's coefficients in chunks, streams and steps; the signal it remembers; late positions."""

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.ops import LegsState, legs_memory, legs_step, reconstruct
from dist_attn_papers.ops.legs import (
    BLOCK_CHUNKS,
    CHUNK_TOKENS,
    absorb_signal,
    forgetting,
    legs_memory_naive,
    reconstruct_naive,
    side_by_side,
    transition_of,
)
from dist_attn_papers.ops.state_space import legs
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor


def test_coefficients_are_the_golden_ones():
    """The memory of the golden signal, read coefficient by coefficient, is the golden file's at every token."""
    g = golden("hippo_legs")
    f_1LN = g["legs_f"][None, :, None].expand(1, -1, 8)
    for form in (legs_memory_naive, legs_memory):
        y_1LN, after = form(f_1LN, torch.eye(8, dtype=torch.float64))
        assert_close(y_1LN[0], g["legs_c"], kind="golden")
        assert_close(after.c_BDN[0, 0], g["legs_c"][-1], kind="golden")


@pytest.mark.parametrize("size", [1, 2, 7, 24])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 150])
def test_chunks_equal_the_oracle(length, size):
    """Outputs, final state and all gradients are the oracle's, for any length, from a state at other positions."""
    f, read, c = random_tensor(2, length, 3, seed=0), random_tensor(3, size, seed=1), random_tensor(2, 3, size, seed=2)
    weights, of_state = random_tensor(2, length, 3, seed=3), random_tensor(2, 3, size, seed=4)

    def run(form):
        inputs = [t.clone().requires_grad_() for t in (f, read, c)]
        y, after = form(inputs[0], inputs[1], state=LegsState(inputs[2], torch.tensor([0, 77])))
        ((y * weights).sum() + (after.c_BDN * of_state).sum()).backward()
        return y, after, [t.grad for t in inputs]

    got, want = run(legs_memory), run(legs_memory_naive)
    assert_close(got[0], want[0])
    assert_close(got[1].c_BDN, want[1].c_BDN, kind="state")
    assert got[1].seen_B.tolist() == want[1].seen_B.tolist() == [length, 77 + length]
    for mine, theirs in zip(got[2], want[2], strict=True):
        assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs, kind="gradient")


def test_a_constant_signal_is_remembered_exactly():
    """From a state that is the constant itself, every later one is; from nothing, the memory comes to it as 1/t."""
    f = torch.full((1, 400, 1), 1.5, dtype=torch.float64)
    c = torch.zeros(1, 1, 6, dtype=torch.float64)
    c[..., 0] = 1.5
    _, after = legs_memory(f, torch.ones(1, 6), state=LegsState(c, torch.tensor([10])))
    assert_close(after.c_BDN, c, kind="state")
    _, after = legs_memory(f, torch.ones(1, 6).double())
    assert float(after.c_BDN[0, 0, 0]) == pytest.approx(1.5 * (1 - 1 / 801), rel=1e-12)


def test_steps_equal_one_call_far_into_a_text():
    """A hundred million tokens into a text, tokens still change the memory as the oracle says, alone and in chunks."""
    c, f, read = random_tensor(1, 2, 8, seed=5), random_tensor(1, 40, 2, seed=6), random_tensor(2, 8, seed=7)
    start = LegsState(c, torch.tensor([10**8]))
    want, end = legs_memory_naive(f, read, state=start)
    y, after = legs_memory(f, read, state=start)
    state = start
    for t in range(40):
        state = legs_step(f[:, t], state)
    assert_close(y, want)
    for got in (after, state, absorb_signal(f, start)):
        assert_close(got.c_BDN - c, end.c_BDN - c, kind="golden")
        assert not torch.equal(got.c_BDN, c)


def test_half_precision_keeps_the_state():
    """Signals of bfloat16 are read in float32 and leave the state of their values in float64."""
    f, read = random_tensor(1, 70, 2, seed=8).bfloat16(), random_tensor(2, 5, seed=9).float()
    y, after = legs_memory(f, read)
    want, end = legs_memory_naive(f.double(), read.double())
    assert y.dtype == torch.bfloat16 and after.c_BDN.dtype == torch.float64
    assert_close(after.c_BDN, end.c_BDN, kind="state")
    assert_close(y, want.bfloat16())


def test_one_step_in_closed_form():
    """I - F is the bilinear step of LegS at early and late times, and never lengthens a vector."""
    a_NN, b_N, _ = legs(9)
    for t in (0.5, 1.0, 3.0, 4.5, 1e3, 1e9):
        left, right = (torch.eye(9, dtype=torch.float64) + sign * a_NN / (2 * t) for sign in (-1, 1))
        forget_NN = forgetting(torch.tensor(t), 9)
        assert_close(forget_NN, torch.linalg.solve(left, left - right), kind="golden")
        assert_close(forget_NN[:, 0], torch.linalg.solve(left, b_N / t), kind="golden")
        assert float(torch.linalg.matrix_norm(torch.eye(9) - forget_NN, 2)) <= 1 + 1e-12


@pytest.mark.parametrize("size", [1, 2, 40])
def test_a_transition_is_known_by_its_first_column(size):
    """The matrix over a stretch of tokens, rebuilt from its first column, is the product of its steps."""
    product = torch.eye(size, dtype=torch.float64)
    for t in range(4, 60):
        product = product - forgetting(torch.tensor(t), size) @ product
    assert_close(transition_of(product[None, :, 0])[0], product)


def test_the_signal_comes_back():
    """A polynomial of the memory's degree comes back from its coefficients, and a smooth signal nearly."""
    t = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    signals = torch.stack([t**3 - 2 * t + 0.5, (5 * t).sin()], dim=1)[None]
    _, after = legs_memory(signals, torch.ones(2, 10))
    back = reconstruct(after.c_BDN, t)[0].T
    assert float((back - signals[0])[200:].abs().max()) < 5e-3


def test_reconstruction_equals_its_oracle():
    """The recurrence of the polynomials gives what their powers of x give, for every order up to 8, with gradients."""
    points = torch.linspace(0, 1, 23, dtype=torch.float64)
    for size in range(1, 9):
        c = random_tensor(2, 3, size, seed=size).requires_grad_()
        assert_close(reconstruct(c, points), reconstruct_naive(c, points), kind="golden")
    assert torch.autograd.gradcheck(lambda x: reconstruct(x, points), (random_tensor(2, 4, seed=1).requires_grad_(),))
    with pytest.raises(ShapeError, match=r"needed is \[P\]"):
        reconstruct(c, points[None])


def test_second_derivatives():
    """The memory is differentiable twice in signal, read-out and state."""
    seen = torch.tensor([2])
    inputs = tuple(random_tensor(*shape, seed=3).requires_grad_() for shape in ((1, 4, 2), (2, 3), (1, 2, 3)))
    assert torch.autograd.gradgradcheck(
        lambda f, read, c: legs_memory(f, read, state=LegsState(c, seen))[0].square(), inputs
    )


def test_blocks_are_bounded():
    """Chunks side by side shrink with order and channels, and there is always one."""
    assert side_by_side(1, 1) == BLOCK_CHUNKS
    assert side_by_side(1 << 20, 8) == side_by_side(1, 512) == 1
    assert side_by_side(64, 32) * CHUNK_TOKENS * 32 * (32 + CHUNK_TOKENS) <= 1 << 19


def test_what_does_not_fit_is_refused():
    """Wrong shapes of signal, read-out and state, and packed documents, are refused in words."""
    f, read = torch.zeros(2, 5, 3), torch.zeros(3, 4)
    with pytest.raises(ShapeError, match=r"needed are f \[B, L, D\] and read \[D, N\]"):
        legs_memory(f, read[:2])
    with pytest.raises(ShapeError, match=r"needed are \[B, D, N\] = \(2, 3, 4\) and \[B\]"):
        legs_memory(f, read, state=LegsState.empty(1, 3, 4))
    with pytest.raises(InputError, match="takes one unbroken sequence"):
        legs_memory(f, read, ops=LocalSequenceOps(documents=(0, 2)))
