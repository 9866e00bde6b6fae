"""The papers' operations on packed documents: each document is as if alone, on one rank and over several."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.documents import document_ranges
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops import (
    diagonal_scan,
    fourier_mix,
    long_convolve,
    mix_tokens,
    relative_attention,
    relative_attention_streaming,
)
from tests.ops import test_documents as local
from tests.ops.test_documents import LENGTH, TABLES, _random
from tests.sharded import test_documents as sharded
from tests.support.closeness import assert_close
from tests.support.examples import examples

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "relative causal": lambda ops, x, rp: relative_attention(x.square(), x.square(), x, rp, causal=True, ops=ops),
    "relative full": lambda ops, x, rp: relative_attention(x.square(), x.square(), x, rp, causal=False, ops=ops),
    "fourier": lambda ops, x, rp: fourier_mix(x[0], ops=ops),
    "fourier ortho": lambda ops, x, rp: fourier_mix(x[0], norm="ortho", ops=ops),
    "long convolution": lambda ops, x, rp: long_convolve(x[0], rp[0], ops=ops),
    "long convolution both ways": lambda ops, x, rp: long_convolve(x[0], rp[0], backward_kernel_LD=rp[1], ops=ops),
    "diagonal": lambda ops, x, rp: diagonal_scan(x[0], *_diagonal(rp), ops=ops)[0],
}
local.CALLS.update(CALLS)
RELATIVE = {
    "relative causal": CALLS["relative causal"],
    "relative full": CALLS["relative full"],
    "relative without window": lambda ops, x, rp: relative_attention(
        x.square(), x.square(), x, rp[:, :1], causal=False, ops=ops
    ),
}
sharded.CALLS.update(RELATIVE)


def _diagonal(rp: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parameters a, b, c [6, 3] of a diagonal recurrence that forgets."""
    return tuple(torch.complex(rp[i, :3].T, 0.3 - rp[i, 3:6].T) * (0.6 if i == 0 else 1.0) for i in range(3))


@pytest.mark.parametrize("documents", TABLES)
def test_the_state_of_a_diagonal_scan_is_the_last_documents(documents):
    """A state given reaches the tokens before the first start alone; the one that comes out is the last document's."""
    x, rp = _random(2, LENGTH, 6, seed=0), _random(4, 9, 6, seed=1, positive=True)
    before = torch.complex(_random(2, 6, 3, seed=2), _random(2, 6, 3, seed=3)).requires_grad_()
    _, after = diagonal_scan(x, *_diagonal(rp), state=before, ops=LocalSequenceOps(documents))
    (start, stop) = document_ranges(documents, LENGTH)[-1]
    _, want = diagonal_scan(x[:, start:stop], *_diagonal(rp))
    assert_close(after, want, kind="state")
    assert not after.requires_grad


def sharded_diagonal(rp: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parameters a, b, c [5, 3] of a diagonal recurrence that forgets."""
    return tuple(torch.complex(rp[i, :3].T, 0.3 - rp[i, 3:6].T) * (0.6 if i == 0 else 1.0) for i in range(3))


@pytest.mark.parametrize("layout", sharded.LAYOUTS.values(), ids=sharded.LAYOUTS.keys())
def test_the_state_of_a_diagonal_scan_over_ranks(layout):
    """From a given state every rank gets that after the last token, and the gradient of the given one adds up."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, layout.total, 5, generator=g, dtype=torch.float64)
    given = torch.randn(2, 5, 3, generator=g, dtype=torch.complex128)
    rp = torch.rand(4, 7, 5, generator=g, dtype=torch.float64)

    def run(ops, start: int, stop: int, share: float) -> list[torch.Tensor]:
        leaf = given.clone().requires_grad_()
        part = x[:, start:stop].clone().requires_grad_()
        y, after = diagonal_scan(part, *sharded_diagonal(rp), state=leaf, ops=ops)
        (y.sum() + share * (after * given.conj()).sum().real).backward()
        return [after.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, part.grad]

    def body(comm: Communicator) -> list[torch.Tensor]:
        # The final state is replicated: exactly one rank counts it in the loss.
        return run(ShardedSequenceOps(comm, layout), *layout.range(comm.rank), share=float(comm.rank == 0))

    want, want_grad, want_part = run(LocalSequenceOps(layout.documents), 0, layout.total, 1.0)
    ranks = run_simulated(body, layout.size)
    assert_close(torch.cat([r[2] for r in ranks], 1), want_part, kind="gradient")
    assert_close(torch.stack([r[1] for r in ranks]).sum(0), want_grad, kind="gradient")
    for after, _, _ in ranks:
        assert_close(after, want, kind="state")


@pytest.mark.parametrize("documents", TABLES[1:6])
@pytest.mark.parametrize("name", CALLS)
def test_every_document_is_as_if_alone(name, documents):
    """Each operation on packed documents is the same operation on each of them alone, with its gradients."""
    local.test_every_document_is_as_if_alone(name, documents)


@pytest.mark.parametrize("layout", sharded.LAYOUTS.values(), ids=sharded.LAYOUTS.keys())
@pytest.mark.parametrize("name", CALLS)
def test_every_operation_over_ranks(name, layout):
    """Every operation on documents over ranks equals that on one rank, with its gradients."""
    sharded._check_call(CALLS[name], layout)


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_attention_without_a_message(name):
    """Where every document lies on one rank, no rank calls any exchange; no bit of another document shows."""
    if name in CALLS:
        local.test_no_bit_of_another_document_shows(name)
    sharded.test_no_document_over_a_cut_no_message(name)
    sharded.test_no_bit_of_another_document_shows(name)


@pytest.mark.parametrize("layout", sharded.LAYOUTS.values(), ids=sharded.LAYOUTS.keys())
def test_relative_attention_without_a_window_over_ranks(layout):
    """With positions that are all alike, documents over ranks equal those on one rank."""
    sharded._check_call(RELATIVE["relative without window"], layout)


@examples(30, deadline=None)
@given(st.sampled_from(sorted(RELATIVE)), sharded.layouts())
def test_relative_attention_for_any_layout(name, layout):
    """So they do however ranks and documents lie."""
    sharded._check_call(RELATIVE[name], layout)


@pytest.mark.parametrize("causal", [True, False])
def test_ten_thousand_documents_of_one_token(causal):
    """Every token attends to itself alone: v comes out of relative attention, over ranks without a message."""
    documents = tuple(range(10_000))
    x, rp = _random(1, 2, 10_000, 8, seed=0).float(), _random(2, 5, 8, seed=1, positive=True).float()
    local_ops = LocalSequenceOps(documents)
    assert_close(relative_attention(x.square(), x.square(), x, rp, causal=causal, ops=local_ops), x)
    layout = SequenceLayout.even(10_000, 3, documents=documents)

    def body(comm: Communicator) -> torch.Tensor:
        ops, part = ShardedSequenceOps(comm, layout), x[:, :, slice(*layout.range(comm.rank))]
        comm.traffic.clear()
        out = relative_attention(part.square(), part.square() + 1, part, rp, causal=causal, ops=ops)
        assert comm.traffic.calls == 0
        return out

    assert_close(torch.cat(run_simulated(body, 3), 2), x)


def test_documents_that_do_not_fit_are_named():
    """Starts that lie behind the sequence are refused in words, and so are documents where none are taken."""
    ops, x = LocalSequenceOps((0, 5)), torch.zeros(1, 5, 4)
    heads, rp = torch.zeros(1, 2, 5, 4), torch.ones(2, 3, 4)
    for call in (
        lambda: relative_attention(heads, heads, heads, rp, causal=True, ops=ops),
        lambda: fourier_mix(x, ops=ops),
        lambda: long_convolve(x, x[0], ops=ops),
        lambda: diagonal_scan(x, *(torch.zeros(4, 2, dtype=torch.complex64) for _ in range(3)), ops=ops),
    ):
        with pytest.raises(ShapeError, match="starts at 5, but the sequence has 5"):
            call()
    with pytest.raises(InputError, match="one unbroken sequence"):
        mix_tokens(x, torch.zeros(5, 3), torch.zeros(3, 5), ops=ops)
    with pytest.raises(InputError, match="one unbroken sequence"):
        relative_attention_streaming(heads, heads, heads, rp, ops=ops)


def test_what_takes_no_documents_says_so_over_ranks():
    """A token MLP over ranks is refused with documents."""
    layout = SequenceLayout.from_lengths([3, 4], [0, 2])

    def body(comm: Communicator) -> None:
        ops, x = ShardedSequenceOps(comm, layout), torch.zeros(1, layout.lengths[comm.rank], 2)
        with pytest.raises(InputError, match="one unbroken sequence"):
            mix_tokens(x, torch.zeros(7, 3), torch.zeros(3, 7), ops=ops)
        with pytest.raises(InputError, match="one unbroken sequence"):
            relative_attention_streaming(x[None], x[None], x[None], torch.zeros(1, 3, 2), ops=ops)

    assert run_simulated(body, 2) == [None, None]


def test_operations_without_the_promise_are_refused():
    """Operations that mix in another way say that they cannot promise the same bits."""

    def body(comm: Communicator) -> None:
        ops = ShardedSequenceOps(comm, SequenceLayout((0, 64, 128)), deterministic=True)
        x, modes, w = torch.zeros(1, 64, 2), torch.zeros(2, 2, dtype=torch.complex64), torch.zeros(128, 3)
        for call in (
            lambda: relative_attention(x[None], x[None], x[None], torch.ones(1, 3, 2), causal=True, ops=ops),
            lambda: relative_attention_streaming(x[None], x[None], x[None], torch.ones(1, 3, 2), ops=ops),
            lambda: fourier_mix(x, ops=ops),
            lambda: long_convolve(x, w[:, :2], ops=ops),
            lambda: diagonal_scan(x, modes, modes, modes, ops=ops),
            lambda: mix_tokens(x, w, w.T, ops=ops),
        ):
            with pytest.raises(InputError, match="cannot promise the same bits"):
                call()

    run_simulated(body, 2)
