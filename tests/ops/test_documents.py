"""Packed documents on one rank: every operation is that of each document alone, to the last bit where it must be."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import LinearState, LocalSequenceOps, absorb_keys
from dist_attn.ops.documents import (
    document_groups,
    document_places,
    document_ranges,
    document_runs,
    sums_of_documents,
)
from dist_attn.ops.linear_attention import linear_attention_naive
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.examples import examples
from tests.support.running_sum import RunningSumCall

LENGTH = 300
TABLES = [(0,), (5,), (0, 299), (64, 128), (0, 3, 4, 5, 64, 65, 200), (10, 11, 12, 140, 290), tuple(range(300))]
tables = st.sets(st.integers(0, LENGTH - 1), max_size=20).map(lambda s: tuple(sorted(s)))


def _random(*shape: int, seed: int, positive: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if positive:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _attend(attention: Callable, inputs: Inputs, causal: bool, **more):
    leaves = inputs.leaves()
    args, kwargs = leaves.arguments()
    out, after = attention(*args, **kwargs, causal=causal, **more)
    weighted_sum(out, *after.tensors()[:4]).backward()
    return out, after, leaves.gradients()


def _check_linear(documents: tuple[int, ...], causal: bool, gate: bool, scale: bool, state: bool) -> None:
    inputs = Inputs.random(LENGTH, LENGTH, gate=gate, scale=scale, state=state)
    want, want_after, want_grads = _attend(linear_attention_naive, inputs, causal, documents=documents)
    got, after, grads = _attend(LocalSequenceOps(documents).linear_attention, inputs, causal)
    assert_close(got, want)
    for field, wanted in zip(after.tensors(), want_after.tensors(), strict=True):
        assert_close(field, wanted, kind="state")
    for name, gradient in want_grads.items():
        assert_close(grads[name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", TABLES)
def test_linear_attention_equals_the_oracle(documents, causal):
    """Outputs, the last document's state and all gradients are the oracle's, with gates, key scales and a state."""
    _check_linear(documents, causal, True, True, True)


@examples(10)
@given(tables, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_linear_attention_for_any_documents(documents, causal, gate, scale, state):
    """So it is for any table of documents and any of the options."""
    _check_linear(documents, causal, gate, scale, state)


@pytest.mark.parametrize("documents", [(), (0,), (7, 90)])
def test_absorbed_keys_are_the_state_of_the_last_document(documents):
    """Keys alone leave the state that attention returns, with the flag of a start where there was one."""
    args, kwargs = Inputs.random(LENGTH, LENGTH, gate=True, scale=True, state=True).arguments()
    _, want = linear_attention_naive(*args, **kwargs, documents=documents)
    got = absorb_keys(*args[1:], **kwargs, documents=documents)
    for field, wanted in zip(got.tensors(), want.tensors(), strict=True):
        assert_close(field, wanted, kind="state")


@pytest.mark.parametrize("documents", [(), *TABLES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_added_in_the_order_of_the_tokens(documents, dtype):
    """Each sum has the bits of its tokens added up one after the other, half precision in float32."""
    x_BLD = _random(2, LENGTH, 3, seed=0).to(dtype).requires_grad_()
    places = LocalSequenceOps(documents).document_places(LENGTH)
    want_BND = torch.zeros(2, len(places.lengths_N), 3, dtype=torch.promote_types(dtype, torch.float32))
    for token, number in enumerate(places.number_L.tolist()):
        want_BND[:, number] += x_BLD.detach()[:, token]
    got_BND = sums_of_documents(x_BLD, places)
    assert torch.equal(got_BND, want_BND)
    (got_BND * want_BND).sum().backward()
    assert torch.equal(x_BLD.grad, want_BND[:, places.number_L].to(dtype))


def test_sums_of_no_tokens_have_gradients():
    """A rank without tokens has zeros for each document, and a way back for the exchange behind them."""
    x_BLD = torch.zeros(2, 0, 3, requires_grad=True)
    sums_BND = sums_of_documents(x_BLD, document_places(((0, 5), (5, 9)), 9, 9, (5,)))
    assert torch.equal(sums_BND, torch.zeros(2, 2, 3))
    sums_BND.sum().backward()
    assert x_BLD.grad.shape == x_BLD.shape


def test_a_state_with_the_flag_drops_what_came_before():
    """What a packed block leaves behind combines with any earlier state as if that had never been."""
    args, kwargs = Inputs.random(50, 50, gate=True, scale=True, state=False).arguments()
    _, after = LocalSequenceOps((20,)).linear_attention(*args, **kwargs)
    earlier = absorb_keys(*args[1:], **kwargs)
    combined = earlier.combine(after)
    assert bool(after.reset_BH.all())
    assert all(torch.equal(x, y) for x, y in zip(combined.tensors(), after.tensors(), strict=True))
    assert bool(LinearState.identity(2, 3, 12, 4, dtype=torch.float64).combine(combined).reset_BH.all())


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "linear causal": lambda ops, x, rp: ops.linear_attention(x, x.square(), x, log_gate_BHS=-x[..., 0].square())[0],
    "linear full": lambda ops, x, rp: ops.linear_attention(
        x, x.square(), x, log_gate_BHS=-x[..., 0].square(), causal=False
    )[0],
    "softmax causal": lambda ops, x, rp: ops.softmax_attention(x, x[:, :2], x[:, :2], causal=True),
    "softmax full": lambda ops, x, rp: ops.softmax_attention(x, x, x, causal=False),
    "convolve": lambda ops, x, rp: ops.convolve(x[0], rp[0]),
    "convolve centred": lambda ops, x, rp: ops.convolve(x[0], rp[0], centred=True),
    "convolve streaming": lambda ops, x, rp: ops.convolve_streaming(x[0], rp[0])[0],
    "gated": lambda ops, x, rp: ops.gated_scan(x[0], -x[1].square())[0],
    "selective": lambda ops, x, rp: ops.selective_scan(
        x[0], x[1].square(), -rp[0, :3].T, x[1, ..., :3], x[0, ..., :3], skip_D=rp[0, 3]
    )[0],
}


@pytest.mark.parametrize("documents", TABLES[1:6])
@pytest.mark.parametrize("name", CALLS)
def test_every_document_is_as_if_alone(name, documents):
    """Each operation on packed documents is the same operation on each of them alone, with its gradients."""
    results = []
    for packed in (True, False):
        x, rp = _random(2, 4, LENGTH, 6, seed=0), _random(4, 9, 6, seed=1, positive=True)
        x.requires_grad_()
        rp.requires_grad_()
        if packed:
            out = CALLS[name](LocalSequenceOps(documents), x, rp)
        else:
            parts = [x[:, :, a:b] for a, b in document_ranges(documents, LENGTH)]
            out = torch.cat([CALLS[name](LocalSequenceOps(), part, rp) for part in parts], dim=-2)
        weighted_sum(out).backward()
        results.append((out, x.grad, torch.zeros_like(rp) if rp.grad is None else rp.grad))
    (got, *grads), (want, *want_grads) = results
    assert_close(got, want)
    for gradient, wanted in zip(grads, want_grads, strict=True):
        assert_close(gradient, wanted, kind="gradient")


@pytest.mark.parametrize("name", CALLS)
def test_no_bit_of_another_document_shows(name):
    """A token that changes leaves outputs and gradients of all other documents bitwise the same, not its own's."""
    documents, token = (0, 20, 21, 90, 230), 60
    rp = _random(4, 9, 6, seed=1, positive=True)
    results = []
    for value in (0.0, 3.0):
        x = _random(2, 4, LENGTH, 6, seed=0)
        x[:, :, token] += value
        x.requires_grad_()
        out = CALLS[name](LocalSequenceOps(documents), x, rp)
        weighted_sum(out).backward()
        results.append((out.detach(), x.grad))
    (before, before_grad), (after, after_grad) = results
    others = [t for t in range(LENGTH) if not 21 <= t < 90]
    assert torch.equal(before[..., others, :], after[..., others, :])
    assert torch.equal(before_grad[:, :, others], after_grad[:, :, others])
    assert not torch.equal(before[..., 21:90, :], after[..., 21:90, :])
    if "causal" in name:
        assert torch.equal(before[..., 21:60, :], after[..., 21:60, :])


@pytest.mark.parametrize("causal", [True, False])
def test_a_document_of_nans_leaves_later_chunks_alone(causal):
    """What is not a number in one document does not travel with the state: later chunks stay clean."""
    x = _random(1, 2, LENGTH, 6, seed=0)
    x[:, :, 10] = float("nan")
    out, after = LocalSequenceOps((0, 150)).linear_attention(x, x, x, causal=causal)
    assert bool(torch.isfinite(out[:, :, 192:]).all())
    assert bool(torch.isfinite(after.s_BHMV).all())


@pytest.mark.parametrize("taps", [1, 2, 5])
@pytest.mark.parametrize("documents", [(), (0,), (3,), (29,), (28,), (5, 27)])
def test_the_tail_of_a_convolution_is_the_last_documents(documents, taps):
    """A block continues the tail that it was given, and leaves one that the next block continues."""
    x, w = _random(2, 60, 3, seed=0), _random(taps, 3, seed=1)
    tail = _random(2, taps - 1, 3, seed=2)
    want, want_after = LocalSequenceOps(documents).convolve_streaming(x, w, tail)
    first, middle = LocalSequenceOps(documents).convolve_streaming(x[:, :30], w, tail)
    second, after = LocalSequenceOps().convolve_streaming(x[:, 30:], w, middle)
    assert_close(torch.cat([first, second], 1), want)
    assert torch.equal(after, want_after)


@pytest.mark.usefixtures("computed_by")
def test_ten_thousand_documents_of_one_token():
    """Every token attends to itself alone: v comes out, in all attentions, and few masked products do it."""
    documents = tuple(range(10_000))
    ops, x = LocalSequenceOps(documents), _random(1, 2, 10_000, 8, seed=0).float()
    for causal in (True, False):
        for out in (
            ops.linear_attention(x.square() + 1, x.square() + 1, x, causal=causal)[0],
            ops.softmax_attention(x, x, x, causal=causal),
        ):
            assert_close(out, x)
    assert len(document_groups(documents, 10_000, 128)) == 79
    assert len(document_runs(documents, 10_000, 128)) == 1


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.sets(st.integers(0, n - 1)).map(sorted), st.just(n))))
def test_groups_tile_the_sequence(case):
    """Groups and runs hold whole documents, tile the sequence, and are few and short enough."""
    documents, length = tuple(case[0]), case[1]
    edges = {edge for pair in document_ranges(documents, length) for edge in pair}
    groups = document_groups(documents, length, 16)
    assert [t for a, b in groups for t in range(a, b)] == list(range(length))
    assert {edge for pair in groups for edge in pair} <= edges
    assert len(groups) <= 2 * length / 16 + 1
    runs = document_runs(documents, length, 16)
    assert tuple((a + x, a + y) for a, b, parts in runs for x, y in (parts or ((0, b - a),))) == groups
    assert all(y - x <= 16 for _, _, parts in runs for x, y in parts)


def test_documents_that_do_not_fit_are_named():
    """Starts that do not rise, lie behind the sequence, or go with keys of another length are refused in words."""
    x = torch.zeros(1, 2, 5, 4)
    for wrong in ((3, 3), (4, 1), (-1,), (1.5,)):
        with pytest.raises(InputError, match="rising whole numbers"):
            LocalSequenceOps(wrong)
    assert LocalSequenceOps([0, 2]).documents == (0, 2)
    ops = LocalSequenceOps((0, 5))
    for call in (
        lambda: ops.linear_attention(x, x, x),
        lambda: ops.softmax_attention(x, x, x, causal=True),
        lambda: ops.convolve(x[0], torch.ones(3, 4)),
        lambda: ops.convolve_streaming(x[0], torch.ones(3, 4)),
    ):
        with pytest.raises(ShapeError, match="starts at 5, but the sequence has 5"):
            call()
    with pytest.raises(ShapeError, match="5 queries and 4 keys"):
        LocalSequenceOps((0,)).linear_attention(x, x[:, :, :4], x[:, :, :4])
    with pytest.raises(InputError, match="one unbroken sequence"):
        ops.run(RunningSumCall(x[0]))
