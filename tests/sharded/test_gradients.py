"""First and second derivatives of every sharded operation, checked against differences over all ranks at once."""

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps, SoftmaxExchange
from dist_attn.sharded.prefix_scan import ScanExchange
from tests.sharded.operation_cases import CASES, KERNEL_CASES, Case, Tensors, inputs_of, linear, softmax
from tests.support.across_ranks import across_ranks

# Which rank has no tokens matters to results, which every operation's own tests compare; derivatives see it once.
CUTS = [(3, 0, 2), pytest.param((0, 4, 1), marks=pytest.mark.slow)]
# A cache of keys is for reading and decoding, a running maximum is a constant; the others are whole numbers.
WITHOUT_GRADIENT = {
    "softmax_attention_streaming", "running_maximum", "positions", "cuts", "document_places", "total_length", "whole",
}  # fmt: skip
EXCHANGES = {
    "pair": (ScanExchange("pair"), (3, 2)),
    "exscan": (ScanExchange("exscan"), (3, 0, 2)),
    "log steps": (ScanExchange("log_step"), (3, 0, 2)),
    "two levels": (ScanExchange("two_level", hosts=((0, 1), (2,))), (3, 0, 2)),
    "pipelined ring": (ScanExchange("pipelined_ring", pieces=2), (0, 3, 2)),
    "serial ring": (ScanExchange("serial_ring"), (3, 0, 2)),
}

# No rank sees an undefined gradient: `across_ranks` gives it zeros.
_gradcheck = partial(torch.autograd.gradcheck, fast_mode=True, check_undefined_grad=False)
_gradgradcheck = partial(torch.autograd.gradgradcheck, fast_mode=True, check_undefined_grad=False)


def _global(
    case: Case,
    lengths: tuple[int, ...],
    *,
    documents: tuple[int, ...] | None = None,
    exchange: ScanExchange | None = None,
    softmax: SoftmaxExchange = "reshuffle",
) -> tuple[Callable[..., Tensor], Tensors]:
    """The operation over all ranks as one function from whole inputs to all outputs in a row, and such inputs."""
    layout = SequenceLayout.from_lengths(lengths, documents)
    names, inputs = inputs_of(case, layout.total)

    def on_rank(comm: Communicator, own: Tensors) -> Tensors:
        ops = ShardedSequenceOps(comm, layout, exchange=exchange or "auto", softmax=softmax)
        return case.run(ops, dict(zip(names, own, strict=True)))

    def whole(*tensors: Tensor) -> Tensor:
        per_rank = []
        for rank in range(layout.size):
            start, stop = layout.range(rank)
            dims = [len(before) for before, _ in case.sliced.values()]
            own = [t.narrow(dim, start, stop - start) for t, dim in zip(tensors, dims, strict=False)]
            per_rank.append((*own, *tensors[len(own) :]))
        # What is the same on all ranks has a gradient from each of them, so each copy is an output of its own.
        return torch.cat([t.flatten() for own in across_ranks(on_rank, per_rank) for t in own])

    return whole, inputs


class _Recorder:
    """Local operations that remember which of them were called."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> object:
        self.called.add(name)
        return getattr(LocalSequenceOps(), name)


def test_every_operation_has_a_case() -> None:
    """Each operation of `SequenceOps` is among the cases, but for those that have no gradient."""
    recorder = _Recorder()
    for case in CASES.values():
        names, inputs = inputs_of(case, 5)
        case.run(cast(SequenceOps, recorder), dict(zip(names, inputs, strict=True)))
    operations = {name for name in vars(SequenceOps) if not name.startswith("_")} - {"run", "deferred_states"}
    assert operations - recorder.called == WITHOUT_GRADIENT


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives(name: str, lengths: tuple[int, ...]) -> None:
    """Moving any input on any rank moves all ranks' outputs as the gradients say, with empty and uneven slices."""
    whole, inputs = _global(CASES[name], lengths)
    assert _gradcheck(whole, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNEL_CASES, "affine, erasing", "delta rule", "gated scan", "selective scan"])
def test_second_derivatives(name: str) -> None:
    """Gradients with `create_graph` are themselves differentiable, across ranks, in every input and state."""
    whole, inputs = _global(CASES[name], (2, 0, 3))
    assert _gradgradcheck(whole, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGES)
def test_derivatives_through_every_exchange(name: str) -> None:
    """However the carries travel, first and second derivatives are those of the function."""
    exchange, lengths = EXCHANGES[name]
    whole, inputs = _global(linear(causal=True, gated=True, given_state=False), lengths, exchange=exchange)
    assert _gradcheck(whole, inputs)
    assert _gradgradcheck(whole, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear, gated, from a state", "softmax", "delta rule", "gated scan"])
def test_derivatives_of_packed_documents(name: str) -> None:
    """With documents over a cut and inside a slice, gradients are derivatives, and so are attention's second ones."""
    whole, inputs = _global(CASES[name], (3, 0, 2), documents=(2, 4))
    assert _gradcheck(whole, inputs)
    if name in KERNEL_CASES:
        assert _gradgradcheck(whole, inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_softmax_in_a_ring(causal: bool) -> None:
    """The ring's gradients are the derivatives of exact attention too."""
    whole, inputs = _global(softmax(causal=causal, groups=1), (3, 0, 2), softmax="ring")
    assert _gradcheck(whole, inputs)


def test_a_gradient_lost_between_ranks_is_noticed() -> None:
    """The check itself fails where an exchange carries values but no gradients."""

    def halves(comm: Communicator, own: Tensors) -> Tensors:
        (x,) = own
        return (x + comm.all_gather(x.detach()).sum(0),)

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda x: torch.cat([y for (y,) in across_ranks(halves, [(x,), (x,)])]), (x,))
