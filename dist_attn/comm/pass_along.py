"""The exclusive scan over ranks by its definition: what came before a rank comes from its neighbour."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from dist_attn.comm.call import Pending

__all__ = ["Combine", "pass_along"]

Combine = Callable[[Tensor, Tensor], Tensor]  # (earlier, later)


class _SendReceive(Protocol):
    def __call__(self, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int], /) -> Pending: ...


class _Place(Protocol):
    rank: int
    size: int


def pass_along(place: _Place, send_receive: _SendReceive, own: Tensor, combine: Combine, reverse: bool) -> Tensor:
    """What the ranks before this one (`reverse`: after it) brought, combined from the first on.

    Shapes: own [n] -> [n].
    Cost: P - 1 steps; n bytes from each rank but the last to the next one.
    """
    order = range(place.size)[:: -1 if reverse else 1]
    before = torch.zeros_like(own)
    for sender, receiver in pairwise(order):
        message = own[:0]
        if place.rank == sender and own.numel():
            message = own if sender == order[0] else combine(before, own)
        send = {receiver: own.numel()} if message.numel() else {}
        recv = {sender: own.numel()} if place.rank == receiver and own.numel() else {}
        received = send_receive(message, send, recv).wait()
        if recv:
            before = received
    return before
