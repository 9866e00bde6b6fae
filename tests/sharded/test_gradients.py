"""First and second derivatives of every sharded operation, checked against differences over all ranks at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from dist_attn import feature_maps
from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, LinearState, LocalSequenceOps, RelativeState, SequenceOps
from dist_attn.ops.relative_attention import WindowState
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.prefix_scan import Exchange
from dist_attn.sharded.sequence_ops import SoftmaxExchange
from tests.support.across_ranks import across_ranks

BATCH, HEADS, SIZE, VALUES = 1, 2, 2, 2
CUTS = [(3, 0, 2), (0, 4, 1)]
# A cache of keys is for reading and decoding; the others are whole numbers.
WITHOUT_GRADIENT = {"softmax_attention_streaming", "positions", "total_length", "whole"}
EXCHANGES = {
    "pair": (Exchange("pair"), (3, 2)),
    "log steps": (Exchange("log_step"), (3, 0, 2)),
    "two levels": (Exchange("two_level", hosts=((0, 1), (2,))), (3, 0, 2)),
    "pipelined ring": (Exchange("pipelined_ring", pieces=2), (0, 3, 2)),
    "serial ring": (Exchange("serial_ring"), (3, 0, 2)),
}

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One operation: which inputs are cut along which dimension, which are equal on all ranks, and what it computes."""

    sliced: dict[str, tuple[tuple[int, ...], int]]  # sizes before the tokens, size after them
    replicated: dict[str, tuple[int, ...]]
    run: Callable[[SequenceOps, dict[str, Tensor]], Tensors]


def _linear(*, causal: bool, gated: bool, given_state: bool, prefix: int = 0) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}
    replicated = {"sigma": (HEADS, 1, SIZE), "w": (HEADS, 2, SIZE)}
    if gated:
        sliced |= {"gate": (per_head, 0), "scale": (per_head, 0)}
    if given_state:
        replicated |= {"s": (*per_head, 4, VALUES), "z": (*per_head, 4), "mass": per_head, "log_decay": per_head}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        state = None
        if given_state:
            no = torch.zeros(per_head, dtype=torch.bool)
            state = LinearState(x["s"], x["z"], x["mass"].exp(), x["log_decay"], no)
        out, after = ops.linear_attention(
            x["q"],
            x["k"],
            x["v"],
            feature_map=feature_maps.Gaussian(x["sigma"] * x["w"], unit_norm=True),
            log_gate_BHS=torch.nn.functional.logsigmoid(x["gate"]) if gated else None,
            key_scale_BHS=torch.sigmoid(-x["scale"]) if gated else None,
            causal=causal,
            state=state,
            denominator=Denominator("floor", 0.3),
            prefix=prefix,
        )
        return (out, *after.tensors()[:4])

    return Case(sliced, replicated, run)


def _relative(*, causal: bool, reach: int) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        q, k, rp = (feature_maps.elu_plus_one(x[name]) for name in ("q", "k", "rp"))
        return (ops.relative_attention(q, k, x["v"], rp, causal=causal),)

    return Case(sliced, {"rp": (HEADS, 2 * reach + 1, SIZE)}, run)


def _relative_streaming(*, reach: int) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}
    columns = VALUES + 1
    replicated = {"rp": (HEADS, 2 * reach + 1, SIZE), "sums": (*per_head, SIZE, columns), "far": (*per_head, columns)}
    replicated["near"] = (*per_head, max(reach - 1, 0), columns)

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        q, k, rp = (feature_maps.elu_plus_one(x[name]) for name in ("q", "k", "rp"))
        # Sums of positive weights, so that no denominator comes near 0.
        state = RelativeState(x["sums"].exp(), WindowState(x["far"].exp(), x["near"].exp(), 3))
        out, after = ops.relative_attention_streaming(q, k, x["v"], rp, state)
        return out, after.sz_BHMW, after.window.far_BHW, after.window.near_BHTW

    return Case(sliced, replicated, run)


def _softmax(*, causal: bool, groups: int) -> Case:
    sliced = {"q": ((BATCH, 2 * groups), SIZE), "k": ((BATCH, groups), SIZE), "v": ((BATCH, groups), VALUES)}
    return Case(sliced, {}, lambda ops, x: (ops.softmax_attention(x["q"], x["k"], x["v"], causal=causal),))


def _tokens(run: Callable[[SequenceOps, dict[str, Tensor]], Tensors], **replicated: tuple[int, ...]) -> Case:
    return Case({"x": ((BATCH,), 3)}, replicated, run)


def _diagonal() -> Case:
    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        a, b, c, state = (torch.view_as_complex(x[name]) for name in ("a", "b", "c", "state"))
        out, after = ops.diagonal_scan(x["x"], a, b, c, state=state)
        return out, torch.view_as_real(after)

    return _tokens(run, a=(3, 2, 2), b=(3, 2, 2), c=(3, 2, 2), state=(BATCH, 3, 2, 2))


KERNEL_CASES = {
    "linear": _linear(causal=True, gated=False, given_state=False),
    "linear, gated, from a state": _linear(causal=True, gated=True, given_state=True),
    "linear, full, gated, from a state": _linear(causal=False, gated=True, given_state=True),
    "linear, gated, with a prefix": _linear(causal=True, gated=True, given_state=False, prefix=3),
    "relative": _relative(causal=True, reach=2),
    "relative, no reach": _relative(causal=True, reach=0),
    "relative, full": _relative(causal=False, reach=2),
    "relative, from a state": _relative_streaming(reach=3),
}
CASES = KERNEL_CASES | {
    "softmax": _softmax(causal=True, groups=1),
    "softmax, full": _softmax(causal=False, groups=2),
    "convolve": _tokens(lambda ops, x: (ops.convolve(x["x"], x["w"]),), w=(4, 3)),
    "convolve, centred": _tokens(lambda ops, x: (ops.convolve(x["x"], x["w"], centred=True),), w=(3, 3)),
    "convolve, streaming": _tokens(
        lambda ops, x: ops.convolve_streaming(x["x"], x["w"], x["tail"]), w=(4, 3), tail=(BATCH, 3, 3)
    ),
    "fourier": _tokens(lambda ops, x: (ops.fourier_mix(x["x"], norm="ortho"),)),
    "long convolution": _tokens(
        lambda ops, x: (ops.long_convolve(x["x"], x["k"], backward_kernel_LD=x["ahead"]),), k=(7, 3), ahead=(2, 3)
    ),
    "token mixing": _tokens(
        lambda ops, x: (ops.mix_tokens(x["x"], x["w"], x["w"].T, bias_in_S=x["b"]),), w=(5, 4), b=(4,)
    ),
    "diagonal scan": _diagonal(),
    "sum": _tokens(lambda ops, x: (x["x"], ops.sum_over_sequence(x["x"]))),
}


def _inputs(case: Case, total: int) -> tuple[list[str], Tensors]:
    """Names and random values of all inputs, those that are cut with `total` tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*before, total, *((after,) if after else ())) for before, after in case.sliced.values()]
    inputs = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (*shapes, *case.replicated.values())
    )
    return [*case.sliced, *case.replicated], tuple(inputs)


def _global(
    case: Case,
    lengths: tuple[int, ...],
    *,
    documents: tuple[int, ...] | None = None,
    exchange: Exchange | None = None,
    softmax: SoftmaxExchange = "reshuffle",
) -> tuple[Callable[..., Tensor], Tensors]:
    """The operation over all ranks as one function from whole inputs to all outputs in a row, and such inputs."""
    layout = SequenceLayout.from_lengths(lengths, documents)
    names, inputs = _inputs(case, layout.total)

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
        names, inputs = _inputs(case, 5)
        case.run(cast(SequenceOps, recorder), dict(zip(names, inputs, strict=True)))
    operations = {name for name in vars(SequenceOps) if not name.startswith("_")}
    assert operations - recorder.called == WITHOUT_GRADIENT


@pytest.mark.parametrize("lengths", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives(name: str, lengths: tuple[int, ...]) -> None:
    """Moving any input on any rank moves all ranks' outputs as the gradients say, with empty and uneven slices."""
    whole, inputs = _global(CASES[name], lengths)
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_second_derivatives(name: str) -> None:
    """Gradients with `create_graph` are themselves differentiable, across ranks, in every input and state."""
    whole, inputs = _global(KERNEL_CASES[name], (2, 0, 3))
    assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


@pytest.mark.parametrize("name", EXCHANGES)
def test_derivatives_through_every_exchange(name: str) -> None:
    """However the carries travel, first and second derivatives are those of the function."""
    exchange, lengths = EXCHANGES[name]
    whole, inputs = _global(_linear(causal=True, gated=True, given_state=False), lengths, exchange=exchange)
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["linear, gated, from a state", "softmax"])
def test_derivatives_of_packed_documents(name: str) -> None:
    """With documents over a cut and inside a slice, gradients are derivatives, and so are attention's second ones."""
    whole, inputs = _global(CASES[name], (3, 0, 2), documents=(2, 4))
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)
    if name in KERNEL_CASES:
        assert torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_softmax_in_a_ring(causal: bool) -> None:
    """The ring's gradients are the derivatives of exact attention too."""
    whole, inputs = _global(_softmax(causal=causal, groups=1), (3, 0, 2), softmax="ring")
    assert torch.autograd.gradcheck(whole, inputs, fast_mode=True)


def test_a_gradient_lost_between_ranks_is_noticed() -> None:
    """The check itself fails where an exchange carries values but no gradients."""

    def halves(comm: Communicator, own: Tensors) -> Tensors:
        (x,) = own
        return (x + comm.all_gather(x.detach()).sum(0),)

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda x: torch.cat([y for (y,) in across_ranks(halves, [(x,), (x,)])]), (x,))
