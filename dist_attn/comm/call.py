"""One exchange between ranks: the call that all agree on, the bytes of a tensor, its result, and its traffic.

Values that ranks compare are words `name=entry,entry,…`, as a layout describes itself; any other text is a field
without entries. Of two values the first entry of the first field that is not the same is named.
"""

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from dist_attn.errors import InputError


@dataclass(frozen=True, slots=True)
class ExchangeCall:
    """The facts of an exchange that all ranks must agree on; -1 in the shape stands for a size that may differ."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""

    def __str__(self) -> str:
        sizes = ", ".join("any" if size < 0 else str(size) for size in self.shape)
        label = f" for {self.label}" if self.label else ""
        return f"{self.name}({self.dtype}[{sizes}]){label}" if self.dtype else f"{self.name}(){label}"


@final
class Pending:
    """An exchange that is under way; `wait` may be called more than once and gives the same tensor."""

    def __init__(self, finish: Callable[[], Tensor], arrive: Callable[[], Tensor] | None = None) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._arrive = arrive
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, once the ranks whose bytes it needs have launched the exchange.

        Raises: CommError if that does not happen within the group's deadline.
        """
        if self._value is None:
            assert self._finish is not None
            self._value = self._finish()
            self._finish = self._arrive = None
        return self._value

    def arrived(self) -> Tensor:
        """Return the result as soon as it is here: what this rank sends may not have left, and must not change.

        That is waited for by `wait`, which every exchange needs.
        """
        return self.wait() if self._arrive is None else self._arrive()


def call_of(name: str, x: Tensor, label: str, rows_may_differ: bool = False) -> ExchangeCall:
    """Describe an exchange of `x` for comparison between ranks; refuses a tensor whose gradient would be lost."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} was given a tensor that requires a gradient, which would be lost here: "
            "use dist_attn.comm.differentiable, or pass x.detach()"
        )
    shape = (-1, *x.shape[1:]) if rows_may_differ else tuple(x.shape)
    return ExchangeCall(name, shape, str(x.dtype).removeprefix("torch."), label)


def bytes_of(x: Tensor) -> Tensor:
    """View the elements of `x` in order as a flat uint8 tensor, which may share memory with `x`."""
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element cut out of a larger tensor counts as contiguous whatever its stride is, and cannot be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum parts[0] + parts[1] + …, from left to right, with float32 sums for half-precision parts."""
    wide = torch.float32 if parts.dtype in (torch.bfloat16, torch.float16) else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(parts.dtype)


Combine = Callable[[Tensor, Tensor], Tensor]  # (earlier, later)


class _SendReceive(Protocol):
    def __call__(self, sent: Tensor, send_bytes: Mapping[int, int], recv_bytes: Mapping[int, int], /) -> Pending: ...


class _Place(Protocol):
    rank: int
    size: int


def pass_along(place: _Place, send_receive: _SendReceive, own: Tensor, combine: Combine, reverse: bool) -> Tensor:
    """Compute the exclusive scan by its definition, from neighbour to neighbour.

    What the ranks before this one (`reverse`: after it) brought is combined from the first on.

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


EVENTS_KEPT = 4096

Phase = Literal["call", "launch", "wait", "mark"]


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log: a blocking call, the launch or the wait of an asynchronous one, or a mark.

    Bytes are counted once, at the call or launch. `seconds` is how long this rank could do nothing else; two events
    are equal whatever time they took.
    """

    name: str
    phase: Phase
    bytes_sent: int = 0
    bytes_received: int = 0
    label: str = ""
    seconds: float = field(default=0.0, compare=False)
    messages: int = field(default=0, compare=False)


@dataclass(slots=True)
class ExchangeTraffic:
    """Running totals of one rank and its last calls in order, oldest first.

    Bytes are payload, as if every pair of ranks that has something to say exchanges one direct message; what a
    back end adds (headers, trees, copies between devices) is not counted. `exposed_s` is the time this rank spent in
    exchanges: in blocking calls, launches and waits, but not what an exchange took while the rank computed. Between
    GPUs a wait does not stop the host, so it is hardly any.

    Units: bytes; seconds; messages are the ones this rank sends.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    calls: int = 0
    exposed_s: float = 0.0
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def record(self, event: Event, messages: int = 0) -> None:
        """Add one event to the log and its bytes to the totals."""
        self.bytes_sent += event.bytes_sent
        self.bytes_received += event.bytes_received
        self.messages += messages
        self.calls += event.phase in ("call", "launch")
        self.exposed_s += event.seconds
        self.events.append(event)

    def mark(self, name: str) -> None:
        """Note in the log that something local happens now, so that its place among the calls can be read off."""
        self.events.append(Event(name, "mark"))

    def order(self) -> list[str]:
        """The log as short lines: `all_gather launch`, `local outputs mark`, `all_gather wait`."""
        return [f"{event.label or event.name} {event.phase}" for event in self.events]

    def clear(self) -> None:
        """Start again at zero."""
        self.bytes_sent = self.bytes_received = self.messages = self.calls = 0
        self.exposed_s = 0.0
        self.events.clear()


RANKS_NAMED = 4
WORD_LENGTH = 80


def differences(values: Sequence[str]) -> str:
    """Name the ranks that differ from rank 0, and how each of the first few does; empty where all are equal."""
    ranks = [rank for rank, value in enumerate(values) if value != values[0]]
    parts = [difference(values[0], values[rank], rank) for rank in ranks[:RANKS_NAMED]]
    return "; ".join(parts) + ("; …" if len(ranks) > RANKS_NAMED else "")


def difference(zero: str, other: str, rank: int) -> str:
    """Name the first difference between the value of rank 0 and the one of another rank."""
    for ours, theirs in zip_longest(zero.split(" "), other.split(" "), fillvalue=""):
        if ours == theirs:
            continue
        name, _, entries = ours.partition("=")
        other_name, _, other_entries = theirs.partition("=")
        if name != other_name or not entries or not other_entries:
            break
        first, second = entries.split(","), other_entries.split(",")
        if len(first) == len(second) == 1:
            return f"{name} is {_short(entries)} on rank 0 and {_short(other_entries)} on rank {rank}"
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if at is None:
            return (
                f"{name} has {len(first)} entries on rank 0 and {len(second)} on rank {rank}, equal as far as both go"
            )
        counts = "" if len(first) == len(second) else f" (of {len(first)} and {len(second)} entries)"
        return f"{name}[{at}] is {_short(first[at])} on rank 0 and {_short(second[at])} on rank {rank}{counts}"
    return f"rank 0 has {_short(zero)!r} and rank {rank} has {_short(other)!r}"


def _short(text: str) -> str:
    return text if len(text) <= WORD_LENGTH else f"{text[:WORD_LENGTH]}…"


def first_line(error: BaseException) -> str:
    """The first line of an error's words."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def host_name(environ: Mapping[str, str]) -> str:
    """Name a host: equal for two ranks exactly when one agent (torchrun's, the engine's), else one machine, runs both.

    Two agents on one machine are two hosts: whoever starts them so wants to try that out.
    """
    return f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}"
