"""The `Communicator` interface: the meaning, checks and counts of each exchange, whatever carries the bytes.

A back end only moves bytes (`_gather`, `_exchange`, `_send_receive`, `_broadcast`; MPI also scans). Shapes, dtypes,
sums and counts are settled here, once, so every back end gives the same bits: sums are taken in the order of the ranks,
in float32 for half-precision tensors, and do not depend on which algorithm moved the numbers.
"""

import hashlib
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import TracebackType
from typing import Self, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dist_attn.comm.call import (
    Combine,
    Event,
    ExchangeCall,
    ExchangeTraffic,
    Pending,
    Phase,
    bytes_of,
    call_of,
    differences,
    host_name,
    pass_along,
    sum_in_order,
)
from dist_attn.errors import CommError, InputError, MismatchError, ShapeError

__all__ = ["Communicator"]

# Up to this size an all-reduce gathers everything in one step (latency); above, it moves 2 (P-1)/P of it (volume).
ONE_STEP_BYTES = 64 * 1024
AGREEMENT = "agreement"  # the label of calls that are compared, which counts apart from what operations move
# All ranks forget together, since all of them agreed on the same values.
AGREED_VALUES_KEPT = 1024


_numbers = itertools.count()
_by_number: "WeakValueDictionary[int, Communicator]" = WeakValueDictionary()


class Communicator(ABC):
    """One rank of a group of `size` ranks that call the same exchanges in the same order.

    Tensors may live on any device; results are new tensors on the device of `x`. No method is differentiable
    (`comm.differentiable` has the ones that are), and a tensor that would lose its gradient is refused.
    Every wait ends at the group's deadline. `label` names a call in the traffic log and must be equal on all ranks.
    `traffic` counts what is exchanged, except what `agree_once` compares: that is in `agreements`.

    Raises: CommError when a rank fails or is late, MismatchError when ranks call different things, ShapeError for
    arguments that do not fit.
    """

    def __init__(self, rank: int, size: int, backend: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.timeout_s = timeout_s
        self._is_part = False
        self.traffic, self.agreements = ExchangeTraffic(), ExchangeTraffic()
        self._agreed = ("", "")
        self._agreed_before: set[tuple[str, str]] = set()
        self._told: dict[str, str] = {}
        self._hosts: tuple[tuple[int, ...], ...] = ()
        # By this number a compiled graph, which holds no objects, finds the communicator again.
        self.number = next(_numbers)
        _by_number[self.number] = self

    @staticmethod
    def of_number(number: int) -> "Communicator":
        """Find the communicator of this process with that `number`.

        Raises: CommError when it is gone.
        """
        found = _by_number.get(number)
        if found is None:
            raise CommError(f"communicator {number} is gone; a compiled model lives no longer than the group it ran on")
        return found

    @abstractmethod
    def _gather(self, call: ExchangeCall, sent: Tensor) -> Pending:
        """Launch: gather every rank's bytes [n] on every rank, as [P n] in order of rank."""

    @abstractmethod
    def _exchange(self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        """Launch: split `sent` by `send_bytes`, part r to rank r; gives this rank's parts, in order of their senders.

        Every rank is waited for, with or without bytes.
        """

    @abstractmethod
    def _send_receive(
        self, call: ExchangeCall, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        """Launch: as `_exchange`, between the ranks named, in ascending order; no rank waits for the others.

        No rank is its own partner, and no count is 0.
        """

    @abstractmethod
    def _broadcast(self, call: ExchangeCall, sent: Tensor, source: int) -> Tensor:
        """Send the bytes [n] of rank `source` to every rank."""

    def _exclusive_scan(self, call: ExchangeCall, sent: Tensor, combine: Combine, reverse: bool) -> Pending:
        """Launch: combine the bytes [n] of the ranks before this one; gives zeros on the first rank.

        Unless a back end has its own, the wait passes them on from rank to rank.
        """
        return Pending(lambda: pass_along(self, partial(self._send_receive, call), sent, combine, reverse))

    @abstractmethod
    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> "Communicator":
        """Make the one of `groups` that this rank is in; every rank makes the call, with the same groups."""

    def set_deadline(self, timeout_s: float) -> None:
        """End every wait that begins from now on after so many seconds; all ranks make the call."""
        self.timeout_s = timeout_s

    def check_exchanges(self) -> None:
        """Wait for this rank's queued exchanges and raise what failed; a rank calls it alone, where a step ends.

        Between GPUs an exchange is only queued, and where it failed its result is anything: what came of it must not
        leave the process before. Other back ends raise in the exchange, or in the wait for it.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Leave the group; calling it twice is fine."""

    @final
    def all_gather(self, x: Tensor, *, label: str = "") -> Tensor:
        """Gather every rank's `x`, in order of rank.

        Shapes: x [...] equal on all ranks -> [P, ...].
        Cost: sends and receives (P-1) |x| bytes in P-1 messages.
        """
        return self._launch_gather(x, label, "call").wait()

    @final
    def all_gather_start(self, x: Tensor, *, label: str = "") -> Pending:
        """Launch an all-gather and come back at once; `x` must not change before `wait()` has returned.

        Shapes and Cost: as `all_gather`.
        """
        return self._launch_gather(x, label, "launch")

    @final
    def all_reduce_sum(self, x: Tensor, *, label: str = "") -> Tensor:
        """Sum `x` over the ranks, added in order of rank, on every rank.

        Shapes: x [...] equal on all ranks -> [...].
        Cost: (P-1) |x| bytes in one step up to 64 KiB, 2 (P-1)/P |x| in two steps above.
        """
        call = call_of("all_reduce_sum", _summable(x), label)
        sent = bytes_of(x)
        if sent.numel() <= ONE_STEP_BYTES or self.size == 1:
            moved = (self.size - 1) * sent.numel()
            with self._counted(call, moved, moved, self.size - 1):
                parts = self._gather(call, sent).wait().view(x.dtype)
            return sum_in_order(parts.reshape(self.size, *x.shape))
        share = -(-x.numel() // self.size)
        padded = torch.zeros(self.size * share, dtype=x.dtype, device=x.device)
        padded[: x.numel()] = x.detach().reshape(-1)
        piece_bytes = share * x.element_size()
        moved = 2 * (self.size - 1) * piece_bytes
        even = [piece_bytes] * self.size
        with self._counted(call, moved, moved, 2 * (self.size - 1)):
            pieces = self._exchange(call, bytes_of(padded), even, even).wait().view(x.dtype).reshape(self.size, share)
            whole = self._gather(call, bytes_of(sum_in_order(pieces))).wait()
        return whole.view(x.dtype)[: x.numel()].reshape(x.shape)

    @final
    def reduce_scatter_sum(self, x: Tensor, *, label: str = "") -> Tensor:
        """Sum over the ranks their `x[rank]`, added in order of rank: each rank gets its own row.

        Shapes: x [P, ...] equal on all ranks -> [...].
        Cost: sends and receives (P-1)/P |x| bytes in P-1 messages.
        """
        return self._launch_reduce_scatter(x, label, "call").wait()

    @final
    def reduce_scatter_sum_start(self, x: Tensor, *, label: str = "") -> Pending:
        """Launch a reduce-scatter and come back at once; `x` must not change before `wait()` has returned.

        Shapes and Cost: as `reduce_scatter_sum`.
        """
        return self._launch_reduce_scatter(x, label, "launch")

    @final
    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], *, label: str = ""
    ) -> Tensor:
        """Send the next `send_counts[r]` rows of `x` to each rank r; receive `recv_counts[r]` rows from it.

        Shapes: x [sum(send_counts), ...] -> [sum(recv_counts), ...] in order of sender; counts may be 0.
        Cost: the rows that go to other ranks, one message for each rank that gets any.
        """
        send, recv = list(send_counts), list(recv_counts)
        if x.dim() == 0 or len(send) != self.size or len(recv) != self.size or min(send + recv) < 0:
            raise ShapeError(
                f"all_to_all needs rows and one count of 0 or more per rank ({self.size}), "
                f"got shape {list(x.shape)}, send_counts {send}, recv_counts {recv}"
            )
        if sum(send) != x.shape[0]:
            raise ShapeError(f"all_to_all was given {x.shape[0]} rows but send_counts {send} add up to {sum(send)}")
        call, sent = call_of("all_to_all", x, label, rows_may_differ=True), bytes_of(x)
        row_bytes = x.element_size() * prod(x.shape[1:])
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self._launch(
            call,
            "call",
            (
                row_bytes * sum(send[rank] for rank in others),
                row_bytes * sum(recv[rank] for rank in others),
                sum(send[rank] > 0 for rank in others),
            ),
            lambda: self._exchange(call, sent, [n * row_bytes for n in send], [n * row_bytes for n in recv]),
            lambda received: received.view(x.dtype).reshape(sum(recv), *x.shape[1:]),
        ).wait()

    @final
    def send_receive(
        self, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
    ) -> Tensor:
        """Send rows to some ranks and receive rows from some; a rank waits only for those that it receives from.

        Every rank makes the call, with empty counts where it has no part in it. Rows lie in ascending order of rank,
        whatever the order of the mappings.

        Shapes: x [sum of send_counts, ...] -> [sum of recv_counts, ...] in order of sender; counts may be 0.
        Cost: these rows, one message for each rank that gets any.
        """
        return self._launch_send_receive(x, send_counts, recv_counts, label, "call").wait()

    @final
    def send_receive_start(
        self, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], *, label: str = ""
    ) -> Pending:
        """Launch a `send_receive` and come back at once; `x` must not change before `wait()` has returned.

        Shapes and Cost: as `send_receive`.
        """
        return self._launch_send_receive(x, send_counts, recv_counts, label, "launch")

    @final
    def exclusive_scan_start(self, x: Tensor, combine: Combine, *, reverse: bool = False, label: str = "") -> Pending:
        """Launch a scan: the `x` of all ranks before this one, combined in order of rank; zeros on the first rank.

        `combine(earlier, later)` is associative with zeros as its identity, need not commute, keeps shape and dtype,
        and is the same on all ranks; what is combined first is the back end's choice. `reverse` counts from the last.

        Shapes: x [...] equal on all ranks -> [...].
        Cost: |x| bytes in 1 message from each rank but the last, to the next one. This is what every back end
            counts: the messages that MPI takes instead, about log2 P, are not to be seen from outside.
        """
        call, sent = call_of("exclusive_scan" + " from the last rank" * reverse, x, label), bytes_of(x)
        first, last = (self.size - 1, 0) if reverse else (0, self.size - 1)
        outgoing, incoming = (0 if self.rank == end else 1 for end in (last, first))

        def on_bytes(earlier: Tensor, later: Tensor) -> Tensor:
            return bytes_of(combine(*(data.view(x.dtype).reshape(x.shape) for data in (earlier, later))))

        return self._launch(
            call,
            "launch",
            (outgoing * sent.numel(), incoming * sent.numel(), outgoing),
            lambda: self._exclusive_scan(call, sent, on_bytes, reverse),
            lambda received: received.view(x.dtype).reshape(x.shape),
        )

    @final
    def broadcast(self, x: Tensor, source: int, *, label: str = "") -> Tensor:
        """Give every rank the `x` of rank `source`; the others' `x` only says what to expect.

        Shapes: x [...] equal on all ranks -> [...].
        Cost: the source sends (P-1) |x| bytes, the others receive |x|.
        """
        if not 0 <= source < self.size:
            raise InputError(f"broadcast from rank {source}, but the ranks are 0 to {self.size - 1}")
        call = call_of(f"broadcast from rank {source}", x, label)
        sent = bytes_of(x)
        outgoing = self.size - 1 if self.rank == source else 0
        incoming = 0 if self.rank == source else sent.numel()
        with self._counted(call, outgoing * sent.numel(), incoming, outgoing):
            return self._broadcast(call, sent, source).view(x.dtype).reshape(x.shape)

    @final
    def barrier(self, *, label: str = "") -> None:
        """Wait until every rank is here."""
        call = ExchangeCall("barrier", label=label)
        with self._counted(call, 0, 0, self.size - 1):
            self._gather(call, torch.zeros(1, dtype=torch.uint8)).wait()

    @final
    def split(self, colour: int) -> "Communicator":
        """Make a group of the ranks that give the same `colour`, in which they keep their order.

        Every rank makes the call. The group has this one's deadline and a log of traffic of its own; close it first.

        Cost: 8 bytes to each other rank, and what the back end needs to make groups.
        Raises: InputError for a group that was split off itself.
        """
        if self._is_part:
            raise InputError("only the group of all ranks can be split; split that one again, by other colours")
        colours = self.all_gather(torch.tensor(colour), label="split").tolist()
        groups = [tuple(r for r, c in enumerate(colours) if c == one) for one in sorted(set(colours))]
        part = self._subgroup(groups)
        part._is_part = True
        return part

    @final
    def require_equal(self, what: str, value: str) -> None:
        """Make sure that all ranks hold the same value (a layout's description, a model's name) before they rely on it.

        Raises: MismatchError on every rank, naming the ranks that differ from rank 0 and in what.
        Cost: 32 bytes to each other rank; the values themselves only where they differ.
        """
        self._compare(what, value, "require_equal")

    def _compare(self, what: str, value: str, label: str) -> None:
        own = torch.frombuffer(bytearray(hashlib.sha256(value.encode()).digest()), dtype=torch.uint8)
        digests = self.all_gather(own, label=label).tolist()
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise MismatchError(
                f"the {what} of rank 0 and of rank {', '.join(map(str, different))} differ: "
                f"{differences(self.all_gather_text(value, label=label))}; give every rank the same {what}"
            )

    @final
    def all_gather_text(self, text: str, *, label: str = "") -> list[str]:
        """Gather every rank's text, in order of rank; an empty one arrives as one space."""
        own = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor(own.numel()), label=label).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        rows = self.all_gather(padded, label=label)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    @final
    def agree_on(self, what: str, value: str) -> None:
        """Require an equal value as `require_equal`, without an exchange where the value is the one last agreed on.

        All ranks agreed on that one: where values differ now, a rank at least exchanges, and none goes on unnoticed.
        """
        if self.size > 1 and (what, value) != self._agreed:
            self.require_equal(what, value)
            self._agreed = (what, value)

    @final
    def agree_once(self, what: str, value: str) -> None:
        """Require an equal value as `require_equal` the first time that it is met, and exchange nothing from then on.

        Cheaper than `agree_on` where values alternate, as those of a model's layers do; ranks that come with two
        different values of which each was agreed on before are not found out.
        """
        if self.size > 1 and (what, value) not in self._agreed_before:
            self._compare(what, value, AGREEMENT)
            if len(self._agreed_before) == AGREED_VALUES_KEPT:
                self._agreed_before.clear()
            self._agreed_before.add((what, value))

    @final
    def told_by_first(self, what: str, value: Callable[[], str]) -> str:
        """Give all ranks rank 0's value: looked up and sent when `what` is asked for first, remembered from then on."""
        if what not in self._told:
            text = value().encode() if self.rank == 0 else b""
            size = int(self.broadcast(torch.tensor([len(text)]), 0, label=what))
            data = torch.zeros(size, dtype=torch.uint8)
            if text:
                data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._told[what] = bytes(self.broadcast(data, 0, label=what).tolist()).decode()
        return self._told[what]

    @final
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """List the ranks of each host, in order of their first ranks: one small exchange, remembered from then on."""
        if not self._hosts:
            name = hashlib.sha256(host_name(os.environ).encode()).digest()
            names = self.all_gather(torch.frombuffer(bytearray(name), dtype=torch.uint8), label="hosts").tolist()
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, one in enumerate(names):
                groups.setdefault(tuple(one), []).append(rank)
            self._hosts = tuple(map(tuple, groups.values()))
        return self._hosts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _launch_gather(self, x: Tensor, label: str, phase: Phase) -> Pending:
        call, sent = call_of("all_gather", x, label), bytes_of(x)
        moved = (self.size - 1) * sent.numel()
        return self._launch(
            call,
            phase,
            (moved, moved, self.size - 1),
            lambda: self._gather(call, sent),
            lambda received: received.view(x.dtype).reshape(self.size, *x.shape),
        )

    def _launch_reduce_scatter(self, x: Tensor, label: str, phase: Phase) -> Pending:
        call, sent = call_of("reduce_scatter_sum", _summable(x), label), bytes_of(x)
        if x.dim() == 0 or x.shape[0] != self.size:
            raise ShapeError(f"reduce_scatter_sum needs one row per rank ({self.size}), got shape {list(x.shape)}")
        piece = sent.numel() // self.size
        moved, even = (self.size - 1) * piece, [piece] * self.size
        return self._launch(
            call,
            phase,
            (moved, moved, self.size - 1),
            lambda: self._exchange(call, sent, even, even),
            lambda received: sum_in_order(received.view(x.dtype).reshape(x.shape)),
        )

    def _launch_send_receive(
        self, x: Tensor, send_counts: Mapping[int, int], recv_counts: Mapping[int, int], label: str, phase: Phase
    ) -> Pending:
        for counts in (send_counts, recv_counts):
            if any(not 0 <= rank < self.size or rank == self.rank or n < 0 for rank, n in counts.items()):
                raise ShapeError(
                    f"send_receive needs counts of 0 or more for ranks 0 to {self.size - 1} without rank {self.rank}, "
                    f"which is this one, got {dict(counts)}"
                )
        rows, expected = sum(send_counts.values()), sum(recv_counts.values())
        if x.dim() == 0 or x.shape[0] != rows:
            raise ShapeError(f"send_receive was given shape {list(x.shape)} but send_counts add up to {rows} rows")
        call, sent = call_of("send_receive", x, label, rows_may_differ=True), bytes_of(x)
        row_bytes = x.element_size() * prod(x.shape[1:])
        send, recv = (
            {rank: row_bytes * counts[rank] for rank in sorted(counts) if row_bytes * counts[rank]}
            for counts in (send_counts, recv_counts)
        )
        return self._launch(
            call,
            phase,
            (sum(send.values()), sum(recv.values()), len(send)),
            lambda: self._send_receive(call, sent, send, recv),
            lambda received: received.view(x.dtype).reshape(expected, *x.shape[1:]),
        )

    def _launch(
        self,
        call: ExchangeCall,
        phase: Phase,
        traffic: tuple[int, int, int],
        start: Callable[[], Pending],
        read: Callable[[Tensor], Tensor],
    ) -> Pending:
        """Start an exchange whose bytes `read` understands; a blocking call has waited when this returns.

        `traffic` is what it sends and receives, in bytes, and in how many messages.
        """
        with self._counted(call, *traffic, phase):
            pending = start()
            if phase == "call":
                value = read(pending.wait())
                return Pending(lambda: value)

        def waited(wait: Callable[[], Tensor]) -> Tensor:
            with self._counted(call, 0, 0, 0, "wait"):
                return read(wait())

        return Pending(lambda: waited(pending.wait), lambda: waited(pending.arrived))

    @contextmanager
    def _counted(
        self, call: ExchangeCall, sent: int, received: int, messages: int, phase: Phase = "call"
    ) -> Iterator[None]:
        """Log the exchange that runs inside, with the time it takes, also when it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            name = call.name.partition(" ")[0]
            traffic = self.agreements if call.label == AGREEMENT else self.traffic
            traffic.record(Event(name, phase, sent, received, call.label, seconds, messages), messages)


def _summable(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        raise ShapeError("a sum over ranks of bool tensors is not defined; convert to an integer type first")
    return x
