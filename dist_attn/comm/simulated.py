"""Ranks as threads of one process: sharded code runs in milliseconds, and every mistake is named at once."""

import contextvars
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Lock, Thread, local
from typing import TypeVar, final

import torch
from torch import Tensor

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import ExchangeCall, Pending
from dist_attn.errors import CommError, InputError, MismatchError

__all__ = ["SimulatedCommunicator", "run_simulated"]

TURN_S = 0.02  # within which a small computation ends, and after which large ones go side by side
POISON = 0xFF  # as any float type, bytes of ones are NaN: a part that was never written shows

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Parcel:
    """The part of one rank in an exchange: its bytes and, between pairs, how many go to and come from each rank."""

    data: Tensor
    send_bytes: tuple[int, ...] = ()
    recv_bytes: tuple[int, ...] = ()


@dataclass(slots=True)
class _Meeting:
    """One exchange: the ranks that have arrived, with their parcels, and how many have collected these."""

    calls: dict[int, ExchangeCall] = field(default_factory=dict)
    parcels: dict[int, _Parcel] = field(default_factory=dict)
    collected: int = 0


@final
class _Turns:
    """Ranks compute one after another, until they wait in an exchange: at once they fight for Python's lock.

    torch gives that lock up in every operation, so that threads which compute at once change places each time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._own = local()

    def take(self) -> None:
        """Wait for a turn of the calling thread, but not for one that computes long or waits outside exchanges."""
        if not getattr(self._own, "held", False):
            self._own.held = self._lock.acquire(timeout=TURN_S)

    def end(self) -> None:
        """Let another rank go on, if the calling thread has the turn."""
        if getattr(self._own, "held", False):
            self._own.held = False
            self._lock.release()


@final
class _Group:
    """The place where the ranks meet; the first failure ends all present and future waits."""

    def __init__(self, size: int, timeout_s: float, turns: _Turns) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.turns = turns
        self.failure: BaseException | None = None
        self._changed = Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._left: dict[int, int] = {}
        self._arrivals = [0] * size
        # Groups that were split off, by the exchange after which they were and their ranks; they fail with this one.
        self._parts: dict[tuple[int, tuple[int, ...]], _Group] = {}

    def part(self, step: int, ranks: tuple[int, ...]) -> "_Group":
        """Find the group of ranks that was split off before exchange number `step`; the first rank to come makes it."""
        with self._changed:
            return self._parts.setdefault((step, ranks), _Group(len(ranks), self.timeout_s, self.turns))

    def arrive(self, rank: int, step: int, call: ExchangeCall, parcel: _Parcel) -> None:
        """Bring a parcel to exchange number `step`; every rank must come with the same call."""
        with self._changed:
            self._check(rank, call)
            self._arrivals[rank] += 1
            meeting = self._meetings.setdefault(step, _Meeting())
            meeting.calls[rank] = call
            meeting.parcels[rank] = parcel
            if any(other != call for other in meeting.calls.values()):
                self._fail_here(_mismatch(step, meeting))
            self._check_counts(rank, step, call, meeting)
            self._changed.notify_all()

    def collect(
        self, rank: int, step: int, call: ExchangeCall, timeout_s: float, senders: Collection[int] | None = None
    ) -> list[_Parcel]:
        """Wait for the parcels of `senders` (of all ranks) in exchange number `step`; returns them in order of rank."""
        wanted = range(self.size) if senders is None else sorted(senders)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            meeting = self._meetings[step]
            while missing := [other for other in wanted if other not in meeting.parcels]:
                self._check(rank, call)
                gone = [other for other in missing if other in self._left]
                if gone:
                    done = self._left[gone[0]]
                    self._fail_here(
                        MismatchError(
                            f"rank {gone[0]} returned after {done} exchange(s) while rank {rank} waits in exchange "
                            f"{step}, {call}: every rank must make the same calls"
                        )
                    )
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._fail_here(
                        CommError(
                            f"rank {rank} waited {timeout_s:g} s in exchange {step}, {call}, for rank "
                            f"{', '.join(map(str, missing))}: it hangs, or needs a longer deadline"
                        )
                    )
                self.turns.end()
                self._changed.wait(left_s)
            meeting.collected += 1
            if meeting.collected == self.size:
                del self._meetings[step]
            return [meeting.parcels[other] for other in wanted]

    def leave(self, rank: int) -> None:
        """Note that the rank makes no more calls, here and in groups that were split off."""
        with self._changed:
            self._left.setdefault(rank, self._arrivals[rank])
            self._changed.notify_all()
            parts = list(self._parts.items())
        for (_, ranks), part in parts:
            if rank in ranks:
                part.leave(ranks.index(rank))

    def fail(self, error: BaseException) -> None:
        """End every wait; only the first failure counts."""
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()
            parts = list(self._parts.values())
        for part in parts:
            part.fail(error)

    def _check_counts(self, rank: int, step: int, call: ExchangeCall, meeting: _Meeting) -> None:
        """Check that what each rank sends to another is what that one expects of it."""
        if not meeting.parcels[rank].send_bytes:
            return
        for other in meeting.parcels:
            for sender, receiver in ((rank, other), (other, rank)):
                sent = meeting.parcels[sender].send_bytes[receiver]
                expected = meeting.parcels[receiver].recv_bytes[sender]
                if sent != expected:
                    self._fail_here(
                        MismatchError(
                            f"exchange {step}, {call}: rank {sender} sends {sent} bytes to rank {receiver}, which "
                            f"expects {expected}; the send counts of one must be the receive counts of the other"
                        )
                    )

    def _fail_here(self, error: CommError) -> None:
        self.failure = error
        self._changed.notify_all()
        raise error

    def _check(self, rank: int, call: ExchangeCall) -> None:
        cause = self.failure
        if cause is not None:
            kind = MismatchError if isinstance(cause, MismatchError) else CommError
            what = str(cause) if isinstance(cause, CommError) else f"{type(cause).__name__}: {cause}"
            raise kind(f"rank {rank} of {self.size} gave up in {call}, because the group failed: {what}") from cause


def _mismatch(step: int, meeting: _Meeting) -> MismatchError:
    """Name the calls of the ranks in an exchange in which they differ."""
    ranks_of: dict[str, list[str]] = {}
    for rank, call in sorted(meeting.calls.items()):
        ranks_of.setdefault(str(call), []).append(str(rank))
    callers = "; ".join(f"rank {', '.join(ranks)} called {call}" for call, ranks in ranks_of.items())
    return MismatchError(f"exchange {step} differs between ranks: {callers}. Every rank must make the same calls")


@final
class SimulatedCommunicator(Communicator):
    """One rank of a group whose ranks are threads."""

    def __init__(self, group: _Group, rank: int) -> None:
        super().__init__(rank, group.size, "simulated", group.timeout_s)
        self._group = group
        self._steps = 0
        self._closed = False

    def _gather(self, call: ExchangeCall, sent: Tensor) -> Pending:
        step = self._bring(call, _Parcel(sent.clone()))

        def finish() -> Tensor:
            parcels = self._collect(step, call)
            received = torch.full((self.size, sent.numel()), POISON, dtype=torch.uint8, device=sent.device)
            for row, parcel in zip(received, parcels, strict=True):
                row.copy_(parcel.data)
            return received.reshape(-1)

        return Pending(finish)

    def _exchange(self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        return self._between_pairs(call, sent, send_bytes, recv_bytes, range(self.size))

    def _send_receive(
        self, call: ExchangeCall, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        ranks = range(self.size)
        send, recv = ([counts.get(rank, 0) for rank in ranks] for counts in (send_bytes, recv_bytes))
        return self._between_pairs(call, sent, send, recv, recv_bytes)

    def _between_pairs(
        self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int], senders: Collection[int]
    ) -> Pending:
        step = self._bring(call, _Parcel(sent.clone(), tuple(send_bytes), tuple(recv_bytes)))

        def finish() -> Tensor:
            received = torch.full((sum(recv_bytes),), POISON, dtype=torch.uint8, device=sent.device)
            place = 0
            for parcel in self._collect(step, call, senders):
                start, count = sum(parcel.send_bytes[: self.rank]), parcel.send_bytes[self.rank]
                received[place : place + count].copy_(parcel.data[start : start + count])
                place += count
            return received

        return Pending(finish)

    def _broadcast(self, call: ExchangeCall, sent: Tensor, source: int) -> Tensor:
        step = self._bring(call, _Parcel(sent.clone()))
        return self._collect(step, call)[source].data.to(sent.device, copy=True)

    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> Communicator:
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        return SimulatedCommunicator(self._group.part(self._steps, ranks), ranks.index(self.rank))

    def close(self) -> None:
        """Leave the group: a rank that waits for this one from now on is told so."""
        self._closed = True
        self._group.leave(self.rank)

    def _bring(self, call: ExchangeCall, parcel: _Parcel) -> int:
        if self._closed:
            raise CommError(f"rank {self.rank} called {call} after it closed its communicator; close it last")
        step = self._steps
        self._steps += 1
        self._group.arrive(self.rank, step, call, parcel)
        return step

    def _collect(self, step: int, call: ExchangeCall, senders: Collection[int] | None = None) -> list[_Parcel]:
        try:
            return self._group.collect(self.rank, step, call, self.timeout_s, senders)
        finally:
            self._group.turns.take()


def run_simulated(fn: Callable[[Communicator], Result], size: int, *, timeout_s: float = 30.0) -> list[Result]:
    """Run `fn(comm)` on `size` ranks, one thread each, and give back what each returned, in order of rank.

    Gradient mode and context variables are those of the caller. Backward runs in the rank's own thread, so
    collectives may stand in it. Random numbers drawn from torch's global generator depend on the order in which
    threads run: give each rank its own `torch.Generator`.

    Raises: the first exception that a rank raised by itself; the others, which only lost a partner, are not shown.
    """
    if size < 1:
        raise InputError(f"run_simulated needs at least 1 rank, got {size}")
    group = _Group(size, timeout_s, _Turns())
    results: dict[int, Result] = {}
    escaped: list[BaseException] = []
    grad_enabled = torch.is_grad_enabled()

    def rank_main(rank: int) -> None:
        comm = SimulatedCommunicator(group, rank)
        group.turns.take()
        try:
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad_enabled):
                results[rank] = fn(comm)
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {size}")
            escaped.append(error)
            group.fail(error)
        finally:
            comm.close()
            group.turns.end()

    threads = [
        Thread(target=contextvars.copy_context().run, args=(rank_main, rank), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    _join(threads, group)
    if len(results) < size:
        raise _first_cause(escaped, group.failure)
    return [results[rank] for rank in range(size)]


def _first_cause(escaped: list[BaseException], failure: BaseException | None) -> BaseException:
    """Choose the exception that a rank raised by itself, before those of ranks that lost a partner by it."""
    own = [error for error in escaped if failure is None or error.__cause__ is not failure]
    return ([*own, failure] if failure is not None else own)[0]


def _join(threads: list[Thread], group: _Group) -> None:
    """Wait for the ranks: as long as they compute, but no longer than the deadline once one has failed."""
    deadline: float | None = None
    try:
        while any(thread.is_alive() for thread in threads):
            if group.failure is not None and deadline is None:
                deadline = time.monotonic() + group.timeout_s
            if deadline is not None and time.monotonic() > deadline:
                return
            next(thread for thread in threads if thread.is_alive()).join(0.1)
    except BaseException as error:
        group.fail(error)
        raise
