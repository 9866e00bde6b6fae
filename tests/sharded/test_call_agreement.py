"""Ranks that call one operation with different arguments stop before anything of it travels."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import MismatchError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator
from dist_attn.sharded import ShardedSequenceOps
from tests.support.ranks import run_processes

LAYOUT = SequenceLayout.from_lengths([3, 0, 2])
Call = Callable[[ShardedSequenceOps, bool, int], object]


def heads(tokens: int, values: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones of two heads."""
    return torch.ones(1, 2, tokens, values, dtype=dtype)


def linear(ops: ShardedSequenceOps, odd: bool, n: int, *, what: str) -> object:
    """Linear attention in which the odd rank differs in `what`."""
    arguments = {
        "gate": {"log_gate_BHS": None if odd else torch.zeros(1, 2, n)},
        "scale": {"key_scale_BHS": torch.ones(1, 2, n) if odd else None},
        "denominator": {"denominator": Denominator("exact") if odd else Denominator()},
        "causal": {"causal": odd},
        "prefix": {"prefix": 2 if odd else 4},
    }
    dtype = torch.float64 if odd and what == "dtype" else torch.float32
    values = heads(n, 4 if odd and what == "values" else 3, dtype)
    return ops.linear_attention(heads(n, dtype=dtype), heads(n, dtype=dtype), values, **arguments.get(what, {}))


def without_gradients(ops: ShardedSequenceOps, odd: bool, n: int) -> object:
    """Linear attention for which the odd rank has turned gradients off."""
    with torch.set_grad_enabled(not odd):
        return linear(ops, odd, n, what="")


CALLS: dict[str, tuple[Call, str]] = {
    "gate": (partial(linear, what="gate"), r"log_gate is float32\[1x2xany\] on rank 0 and none on rank 2"),
    "scale": (partial(linear, what="scale"), "key_scale is none on rank 0"),
    "denominator": (partial(linear, what="denominator"), "denominator.kind is floor on rank 0 and exact on rank 2"),
    "causal": (partial(linear, what="causal"), "causal is false on rank 0 and true on rank 2"),
    "prefix": (partial(linear, what="prefix"), "prefix is 4 on rank 0 and 2 on rank 2"),
    "dtype": (partial(linear, what="dtype"), r"q is float32\[1x2xanyx3\] on rank 0 and float64"),
    "values": (
        partial(linear, what="values"),
        r"v is float32\[1x2xanyx3\] on rank 0 and float32\[1x2xanyx4\] on rank 2",
    ),
    "gradients": (without_gradients, "gradients is true on rank 0 and false on rank 2"),
    "softmax scale": (
        lambda ops, odd, n: ops.softmax_attention(
            heads(n), heads(n), heads(n), causal=True, scale=2.0 if odd else None
        ),
        "scale is none on rank 0 and 2.0 on rank 2",
    ),
    "centred": (
        lambda ops, odd, n: ops.convolve(torch.ones(1, n, 2), torch.ones(3, 2), centred=odd),
        "centred is false on rank 0 and true on rank 2",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_differ_are_named(name: str) -> None:
    """A gate, dtype, size or setting that one rank has alone is a MismatchError that names it, not a wrong result."""
    call, message = CALLS[name]

    def fn(comm: Communicator) -> None:
        call(ShardedSequenceOps(comm, LAYOUT), comm.rank == 2, LAYOUT.lengths[comm.rank])

    with pytest.raises(MismatchError, match=message):
        run_simulated(fn, 3)


def test_equal_calls_are_compared_once() -> None:
    """A call that was agreed on takes no further exchange, whatever lies between; another one takes its own."""

    def fn(comm: Communicator) -> list[int]:
        ops = ShardedSequenceOps(comm, LAYOUT)
        counts = []
        for width in (2, 3, 2, 3):
            comm.agreements.clear()
            ops.sum_over_sequence(torch.ones(1, LAYOUT.lengths[comm.rank], width))
            counts.append(comm.agreements.bytes_sent)
        return counts

    assert run_simulated(fn, 3) == [[64, 64, 0, 0]] * 3


def another_dtype_on_rank_2(comm: Communicator) -> None:
    """Keys and values of another dtype on one rank."""
    linear(ShardedSequenceOps(comm, LAYOUT), comm.rank == 2, LAYOUT.lengths[comm.rank], what="dtype")


def test_processes_survive_arguments_that_differ() -> None:
    """Over gloo, where a message of another size would end a process, every rank lives to raise the MismatchError."""
    outcomes = run_processes(another_dtype_on_rank_2, 3, timeout_s=20.0)
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 3
