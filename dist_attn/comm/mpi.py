"""Ranks as processes over MPI, started by mpiexec: every exchange is messages between pairs of ranks.

No exchange waits inside the MPI library; only making and freeing groups does, for a moment. MPICH's waits spin: with
more ranks than cores, the ranks that wait take the cores from the ones that are waited for, without end if one never
comes. Here every wait asks, gives way, asks again and soon sleeps in between, up to a deadline. Messages between pairs,
rather than MPI's collectives, tell who is late; the exclusive scan is MPI's, in steps of its own, with empty messages
beside it that tell. A message's tag is a digest of its number and its call, so that ranks which call different things
find it out.
"""

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import Combine, ExchangeCall, Pending, first_line
from dist_attn.comm.mpi_library import MpiMessage, Scan, leave_running, pieces, rest, reversed_ranks, start_mpi
from dist_attn.errors import CommError, MismatchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiCommunicator"]

POISON = 0xFF  # as any float type, bytes of ones are NaN
GRACE_S = 0.5  # for messages of a rank that has left, and for the farewells of a group that failed
FAREWELL_BYTES = 400


@final
class MpiCommunicator(Communicator):
    """One rank of all that mpiexec started; use `connect` to make one.

    Tensors on a GPU travel through pinned host memory: MPI does not follow CUDA's streams.
    `poison` fills receive buffers with NaN first, so that a part which no rank wrote shows in tests.
    """

    def __init__(
        self,
        mpi: ModuleType,
        data: "MPI.Intracomm",
        reverse: "MPI.Intracomm",
        farewells: "MPI.Intracomm",
        timeout_s: float,
        *,
        poison: bool = False,
    ) -> None:
        super().__init__(data.Get_rank(), data.Get_size(), "mpi", timeout_s)
        self._mpi = mpi
        self._data = data
        self._reverse = reverse  # the same ranks, counted from the last
        self._farewells = farewells
        self._poison = poison
        self._tags = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or 32767
        self._sent = [0] * self.size  # messages to each rank so far, and from each
        self._received = [0] * self.size
        self._under_way: dict[int, list[MpiMessage | Scan]] = {}
        self._left: dict[int, tuple[bool, str]] = {}  # who has left: whether in order, and why if not at its end
        self._failure = ""
        self._reason = ""
        self._closed = False

    @classmethod
    def connect(cls, *, timeout_s: float, poison: bool = False) -> "MpiCommunicator":
        """Join the ranks that mpiexec started together with this process, or be a group of one without mpiexec.

        Raises: MissingExtraError without mpi4py; CommError if the ranks do not come together within the deadline.
        """
        mpi = start_mpi(timeout_s)
        world = mpi.COMM_WORLD
        data, farewells = (_duplicate(mpi, world, timeout_s) for _ in range(2))
        return cls(mpi, data, _reversed(mpi, data, timeout_s), farewells, timeout_s, poison=poison)

    def _gather(self, call: ExchangeCall, sent: Tensor) -> Pending:
        received = self._buffer(self.size * sent.numel(), sent.device)
        sends = dict.fromkeys(range(self.size), self._on_host(sent))
        receives = _parts(received, dict.fromkeys(range(self.size), sent.numel()))
        return self._post(call, sends, receives, received, sent)

    def _exchange(self, call: ExchangeCall, sent: Tensor, send_bytes: list[int], recv_bytes: list[int]) -> Pending:
        return self._send_receive(call, sent, dict(enumerate(send_bytes)), dict(enumerate(recv_bytes)))

    def _send_receive(
        self, call: ExchangeCall, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int]
    ) -> Pending:
        received = self._buffer(sum(recv_bytes.values()), sent.device)
        sends, receives = _parts(self._on_host(sent), send_bytes), _parts(received, recv_bytes)
        return self._post(call, sends, receives, received, sent)

    def _broadcast(self, call: ExchangeCall, sent: Tensor, source: int) -> Tensor:
        received = self._buffer(sent.numel(), sent.device)
        sends = dict.fromkeys(range(self.size), self._on_host(sent)) if self.rank == source else {}
        return self._post(call, sends, {source: received}, received, sent).wait()

    def _subgroup(self, groups: Sequence[tuple[int, ...]]) -> Communicator:
        colour = next(index for index, ranks in enumerate(groups) if self.rank in ranks)
        try:
            # These wait inside the library, but not for long: all ranks have just told each other their colours.
            data, farewells = (
                cast("MPI.Intracomm", world.Split(colour, self.rank)) for world in (self._data, self._farewells)
            )
        except self._mpi.Exception as error:
            raise CommError(f"{self._who()} could not split its group: {first_line(error)}") from error
        for part in (data, farewells):
            part.Set_errhandler(self._mpi.ERRORS_RETURN)
        reverse = _reversed(self._mpi, data, self.timeout_s)
        return MpiCommunicator(self._mpi, data, reverse, farewells, self.timeout_s, poison=self._poison)

    def _exclusive_scan(self, call: ExchangeCall, sent: Tensor, combine: Combine, reverse: bool) -> Pending:
        before = self._buffer(sent.numel(), sent.device)
        if self.rank == (self.size - 1 if reverse else 0):  # MPI leaves it as it is
            before.zero_()
        nothing = torch.empty(0, dtype=torch.uint8)
        roll_call = {rank: nothing for rank in range(self.size) if rank != self.rank}
        comm = self._reverse if reverse else self._data

        def scan(answers: list[MpiMessage]) -> Scan:
            return Scan(self._mpi, comm, self._on_host(sent), before, combine, answers)

        return self._post(call, roll_call, roll_call, before, sent, scan if sent.numel() else None)

    def close(self) -> None:
        """Leave the group in step with the others; after a failure they are told, and waited for only briefly."""
        if self._closed:
            return
        self._closed = True
        if self._under_way and not self._failure:
            self._failure = self._reason or f"rank {self.rank} closed its communicator with an exchange under way"
        text = f"{int(bool(self._failure))}{self._failure or self._reason}".encode()[:FAREWELL_BYTES]
        others = [rank for rank in range(self.size) if rank != self.rank]
        messages = [MpiMessage(self._mpi, self._farewells.Isend([text, self._mpi.BYTE], r), r) for r in others]
        began = time.monotonic()
        while not self._all_have_left(messages):
            waited = time.monotonic() - began
            if waited > (self.timeout_s if self._in_order() else min(GRACE_S, self.timeout_s)):
                self._failure = self._failure or f"rank {self.rank} closed its communicator, but others did not"
                break
            rest(waited)
        if self._in_order():
            self._data.Free()
            self._reverse.Free()
            self._farewells.Free()
        else:
            leave_running(text, messages, self._under_way)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reason = f"rank {self.rank} left with {type(error).__name__}: {error}"
        super().__exit__(kind, error, trace)

    def _post(
        self,
        call: ExchangeCall,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        received: Tensor,
        sent: Tensor,
        scan: Callable[[list[MpiMessage]], Scan] | None = None,
    ) -> Pending:
        """Start the messages of one exchange, empty ones too; the result is `received`, moved to where `sent` lay."""
        self._check(call)
        messages: list[MpiMessage | Scan] = []
        flight = id(messages)
        self._under_way[flight] = messages
        try:
            for rank, place in receives.items():
                if rank != self.rank:
                    tag = self._tag(call, self._received, rank)
                    for piece in pieces(place):
                        request = self._data.Irecv([piece.numpy(), self._mpi.BYTE], rank, tag)
                        messages.append(MpiMessage(self._mpi, request, rank, piece.numel()))
            awaited = list(messages)
            for rank, part in sends.items():
                if rank != self.rank:
                    tag = self._tag(call, self._sent, rank)
                    for piece in pieces(part):
                        request = self._data.Isend([piece.numpy(), self._mpi.BYTE], rank, tag)
                        messages.append(MpiMessage(self._mpi, request, rank))
            if scan is not None:
                messages.append(scan([message for message in messages if isinstance(message, MpiMessage)]))
        except self._mpi.Exception as error:
            raise self._failed(call, first_line(error)) from error
        if self.rank in receives:
            own = sends[self.rank]
            place = receives[self.rank]
            if own.numel() != place.numel():
                why = f"rank {self.rank} sends itself {own.numel()} bytes but expects {place.numel()}"
                self._failed(call, why)
                raise MismatchError(f"{self._who()}: {self._failure}")
            place.copy_(own)

        def finish() -> Tensor:
            self._wait(call, messages)
            del self._under_way[flight]
            return received.to(sent.device)

        def arrive() -> Tensor:
            self._wait(call, awaited)
            return received.to(sent.device)

        return Pending(finish, arrive if scan is None else None)

    def _wait(self, call: ExchangeCall, messages: list[MpiMessage | Scan]) -> None:
        """Wait until all messages have been sent or have arrived, at most until the deadline."""
        self._check(call)
        began = time.monotonic()
        deadline = began + self.timeout_s
        waiting = messages
        while True:
            try:
                waiting = [message for message in waiting if not message.done()]
                if not waiting:
                    return
                self._hear_farewells()
            except MismatchError as error:
                self._failed(call, str(error))
                raise MismatchError(f"{self._who()}: {self._failure}") from error
            except self._mpi.Exception as error:
                raise self._failed(call, first_line(error)) from error
            now = time.monotonic()
            if now > deadline:
                raise self._late(call, waiting, now - began)
            if self._reasons() or any(message.partner in self._left for message in waiting):
                # Messages that they sent before they left may still be on their way.
                deadline = min(deadline, now + GRACE_S)
            rest(now - began)

    def _late(self, call: ExchangeCall, waiting: list[MpiMessage | Scan], waited_s: float) -> CommError:
        """Name the ranks waited for in vain, and what is known of them; a scan under way may lack any of the others."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        partners = sorted({message.partner for message in waiting if isinstance(message, MpiMessage)}) or others
        elsewhere = [rank for rank in partners if self._data.Iprobe(source=rank, tag=self._mpi.ANY_TAG)]
        gone = [rank for rank in partners if rank in self._left]
        what = f"waited {waited_s:.1f} s for {_ranks(partners)}"
        if elsewhere:
            # A message of theirs that no call here waits for has come, and none of those that this one waits for.
            self._failed(call, f"{what}, but {_ranks(elsewhere)} called something else")
            return MismatchError(f"{self._who()}: {self._failure}. Every rank must make the same calls")
        if (reasons := self._reasons()) and waited_s < self.timeout_s:
            return self._failed(call, f"{what}, but the group has failed: {reasons[0]}")
        if gone:
            return self._failed(call, f"{what}, but {_ranks(gone)} has closed its communicator")
        return self._failed(call, f"{what}; it died, hangs or is late by more than {self.timeout_s:g} s")

    def _failed(self, call: ExchangeCall, why: str) -> CommError:
        self._failure = f"{call} failed: {why}"
        return CommError(f"{self._who()}: {self._failure}")

    def _check(self, call: ExchangeCall) -> None:
        if self._closed:
            raise CommError(f"rank {self.rank} called {call} after it closed its communicator; close it last")
        if self._failure:
            raise CommError(f"{self._who()} cannot do {call}: {self._failure}")

    def _who(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.backend})"

    def _hear_farewells(self) -> None:
        """Take in the farewells of ranks that have left meanwhile."""
        status = self._mpi.Status()
        while self._farewells.Iprobe(status=status):
            text = bytearray(status.Get_count(self._mpi.BYTE))
            self._farewells.Recv([text, self._mpi.BYTE], source=status.Get_source())
            self._left[status.Get_source()] = (text.startswith(b"0"), text[1:].decode(errors="replace"))

    def _all_have_left(self, farewells: list[MpiMessage]) -> bool:
        """Return whether every rank has said farewell and has got this one's; an error of MPI counts as a failure."""
        try:
            self._hear_farewells()
            return len(self._left) == self.size - 1 and all(message.done() for message in farewells)
        except self._mpi.Exception as error:
            self._failure = self._failure or f"rank {self.rank} could not take leave: {first_line(error)}"
            return False

    def _reasons(self) -> list[str]:
        """The reasons why ranks have left before their end."""
        return [reason for _, (_, reason) in sorted(self._left.items()) if reason]

    def _in_order(self) -> bool:
        """Return whether no exchange has failed or was left under way, as far as is known here."""
        return not self._failure and all(in_order for in_order, _ in self._left.values())

    def _tag(self, call: ExchangeCall, counts: list[int], rank: int) -> int:
        """The tag of the next message between this pair: a digest of its number and its call."""
        counts[rank] += 1
        return zlib.crc32(f"{counts[rank]} {call}".encode()) % self._tags

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return buffer.fill_(POISON) if self._poison else buffer

    def _on_host(self, x: Tensor) -> Tensor:
        return self._buffer(x.numel(), x.device).copy_(x) if x.device.type != "cpu" else x


def _duplicate(mpi: ModuleType, world: "MPI.Intracomm", timeout_s: float) -> "MPI.Intracomm":
    """Duplicate `world`: a communicator with its ranks, whose messages mix with no others."""
    world.Set_errhandler(mpi.ERRORS_RETURN)
    copy, request = world.Idup()
    began = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - began
        if waited > timeout_s:
            leave_running(copy, request)
            raise CommError(
                f"rank {world.Get_rank()} of {world.Get_size()} could not join the mpi group within {timeout_s:g} s: "
                "another rank has started but does not join"
            )
        rest(waited)
    copy.Set_errhandler(mpi.ERRORS_RETURN)
    return copy


def _reversed(mpi: ModuleType, comm: "MPI.Intracomm", timeout_s: float) -> "MPI.Intracomm":
    """Make a communicator with the ranks of `comm` from the last to the first.

    MPI has no such call that only starts; all ranks are here in a moment, since they have all duplicated `comm`. A
    thread waits inside the library, which has let go of the interpreter's lock, and this one waits for it.
    """
    found: list[MPI.Intracomm] = []
    thread = threading.Thread(target=lambda: found.append(reversed_ranks(comm)), name="mpi-split", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        leave_running(comm, found)
        raise CommError(
            f"rank {comm.Get_rank()} of {comm.Get_size()} could not join the mpi group within {timeout_s:g} s: "
            "another rank has joined it but went no further"
        )
    found[0].Set_errhandler(mpi.ERRORS_RETURN)
    return found[0]


def _parts(whole: Tensor, counts: Mapping[int, int]) -> dict[int, Tensor]:
    """Cut `whole` into each rank's part; they lie in ascending order."""
    ranks = sorted(counts)
    return dict(zip(ranks, whole.split([counts[rank] for rank in ranks]), strict=True))


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
