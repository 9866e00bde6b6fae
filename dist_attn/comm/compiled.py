"""The exchanges with gradients as one registered operator, which a compiler puts into its graph without looking inside.

A graph holds numbers and tensors only, so a communicator goes in as its number. Nothing is launched early in a graph:
an exchange is one node that returns when it is done.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from dist_attn.comm.base import Communicator

__all__ = ["Kind", "compiled_exchange"]

Kind = Literal["all_gather", "reduce_scatter_sum", "all_reduce_sum", "all_to_all", "send_receive", "broadcast"]
# The way back of a broadcast: the sum of all ranks' gradients at its source, zeros elsewhere.
_SUM_AT_SOURCE = "sum_at_source"
_BACKWARD: dict[str, str] = {kind: kind for kind in get_args(Kind)} | {
    "all_gather": "reduce_scatter_sum",
    "reduce_scatter_sum": "all_gather",
    "broadcast": _SUM_AT_SOURCE,
    _SUM_AT_SOURCE: "broadcast",
}


def compiled_exchange(
    comm: Communicator,
    kind: Kind,
    x: Tensor,
    send_counts: Sequence[int] | Mapping[int, int] = (),
    recv_counts: Sequence[int] | Mapping[int, int] = (),
    *,
    label: str,
) -> Tensor:
    """The exchange of that name in `comm.differentiable`, as a node of a graph that is being compiled.

    The one count of a broadcast is its source.
    """
    send, recv = _flat(send_counts), _flat(recv_counts)
    return cast(Tensor, _exchange(x, comm.number, comm.size, kind, send, recv, label))


def _flat(counts: Sequence[int] | Mapping[int, int]) -> list[int]:
    """Counts per rank as they are; counts by rank as rank, count, rank, count, …"""
    if isinstance(counts, Mapping):
        return [number for pair in counts.items() for number in pair]
    return list(counts)


@torch.library.custom_op("dist_attn::exchange", mutates_args=())
def _exchange(x: Tensor, number: int, ranks: int, kind: str, send: list[int], recv: list[int], label: str) -> Tensor:
    comm = Communicator.of_number(number)
    if kind == "all_to_all":
        return comm.all_to_all(x.detach(), send, recv, label=label)
    if kind == "send_receive":
        counts = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in (send, recv)]
        return comm.send_receive(x.detach(), *counts, label=label)
    if kind == "broadcast":
        return comm.broadcast(x.detach(), send[0], label=label)
    if kind == _SUM_AT_SOURCE:
        total = comm.all_reduce_sum(x.detach(), label=label)
        return total if comm.rank == recv[0] else torch.zeros_like(total)
    exchange = {
        "all_gather": comm.all_gather,
        "reduce_scatter_sum": comm.reduce_scatter_sum,
        "all_reduce_sum": comm.all_reduce_sum,
    }[kind]
    return exchange(x.detach(), label=label)


@_exchange.register_fake
def _(x: Tensor, number: int, ranks: int, kind: str, send: list[int], recv: list[int], label: str) -> Tensor:
    if kind == "all_gather":
        return x.new_empty((ranks, *x.shape))
    if kind == "reduce_scatter_sum":
        return x.new_empty(x.shape[1:])
    if kind in ("all_reduce_sum", "broadcast", _SUM_AT_SOURCE):
        return x.new_empty(x.shape)
    rows = sum(recv) if kind == "all_to_all" else sum(recv[1::2])
    return x.new_empty((rows, *x.shape[1:]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.number, ctx.ranks, ctx.kind, ctx.send, ctx.recv, ctx.label = inputs


def _backward(ctx: Any, grad: Tensor) -> Any:
    label = f"{ctx.label} backward".strip()
    back = _exchange(grad, ctx.number, ctx.ranks, _BACKWARD[ctx.kind], ctx.recv, ctx.send, label)
    return back, None, None, None, None, None, None


_exchange.register_autograd(_backward, setup_context=_remember)
