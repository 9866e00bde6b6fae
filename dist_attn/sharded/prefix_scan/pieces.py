"""Exchanges whose messages are pieces of an element: along a ring, and over hosts of several ranks.

In the ring, while a rank adds its part to one piece, the next piece is on its way to it. Over two levels the scan runs
inside each host, then between hosts with each rank of a host carrying a piece.

Shape letters: X numbers of a message or piece, K rows and N columns of sums, W numbers that every piece has.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ConfigError
from dist_attn.ops.monoid import Monoid
from dist_attn.ops.parts import connected
from dist_attn.sharded.prefix_scan.exchanges import LABEL, Finish, rows_of

Hosts = Sequence[Sequence[int]]


def _columns(monoid: Monoid, message: torch.Tensor) -> int:
    """The columns of B in a message: it is cut into no more pieces than these."""
    return max(1, (message.shape[-1] - monoid.weights) // monoid.rows)


def split_pieces(monoid: Monoid, message: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    """Messages of equal size, each with some columns of B and all of A, that can be combined by themselves.

    Shapes: [..., K n + W] -> `pieces` times [..., K ceil(n / pieces) + W]; zeros fill the last one.
    """
    columns_KN = message[..., : -monoid.weights].unflatten(-1, (monoid.rows, -1))
    weights = message[..., -monoid.weights :]
    width = -(-columns_KN.shape[-1] // pieces)
    padded_KN = F.pad(columns_KN, (0, pieces * width - columns_KN.shape[-1]))
    return tuple(torch.cat([part.flatten(-2), weights], dim=-1) for part in padded_KN.split(width, dim=-1))


def join_pieces(monoid: Monoid, pieces: "tuple[torch.Tensor, ...] | list[torch.Tensor]", columns: int) -> torch.Tensor:
    """The message of `columns` numbers that was split into these."""
    parts_KN = [piece[..., : -monoid.weights].unflatten(-1, (monoid.rows, -1)) for piece in pieces]
    sums_KN = torch.cat(parts_KN, dim=-1)[..., : (columns - monoid.weights) // monoid.rows]
    return torch.cat([sums_KN.flatten(-2), pieces[0][..., -monoid.weights :]], dim=-1)


def start_pipelined_ring(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, pieces: int) -> Finish:
    """Launch the first step; waiting does the others and gives the elements before this rank and of all, combined.

    Piece k of the elements up to rank r leaves it in step r + k; the total turns round at the last rank and reaches
    rank r in step P - 1 + k + r.

    Cost: 2 P + pieces - 3 steps. A rank sends at most twice the element, cut in pieces that each carry the weights:
        4 B H (K ceil(n / pieces) + W) bytes a piece. Backward the same.
    """
    pieces = min(pieces, _columns(monoid, element_BHX))
    ring = _Ring(comm, monoid, element_BHX, pieces)
    ring.launch(0)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(2 * comm.size + pieces - 3):
            if step:
                ring.launch(step)
            ring.wait(step)
        return ring.results()

    return finish


class _Ring:
    """One rank's pieces, and which of them it sends and receives in each step."""

    def __init__(self, comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, pieces: int) -> None:
        self._comm, self._monoid, self._columns = comm, monoid, element_BHX.shape[-1]
        self._own = split_pieces(monoid, element_BHX, pieces)
        self._before = [torch.zeros_like(piece) for piece in self._own]
        self._total = [torch.zeros_like(piece) for piece in self._own]
        self._previous = torch.stack(self._own)
        self._launched: collectives.Launched | collectives.FinishedExchange | None = None

    def launch(self, step: int) -> None:
        rank, size = self._comm.rank, self._comm.size
        messages = []
        up_to = _index(step - rank, self._own)
        if up_to is not None:  # the last rank's sum up to itself is the total
            messages.append(self._monoid.combine(self._before[up_to], self._own[up_to]))
            if rank == size - 1:
                self._total[up_to] = messages[-1]
        whole = _index(step - size - rank, self._own)
        if whole is not None and rank < size - 2:
            messages.append(self._total[whole])
        send = {(rank + 1) % size: len(messages)} if messages else {}
        expected = sum(piece is not None for piece in self._expected(step))
        recv = {(rank - 1) % size: expected} if expected else {}
        rows = rows_of(messages, self._previous)
        self._launched = collectives.send_receive_start(self._comm, rows, send, recv, label=LABEL)

    def wait(self, step: int) -> None:
        assert self._launched is not None
        self._previous = self._launched.wait()
        rows = iter(self._previous.unbind(0))
        up_to, whole = self._expected(step)
        if up_to is not None:
            self._before[up_to] = next(rows)
        if whole is not None:
            self._total[whole] = next(rows)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements before this rank and those of all, combined."""
        before_BHX = join_pieces(self._monoid, self._before, self._columns)
        return connected(before_BHX, self._previous), join_pieces(self._monoid, self._total, self._columns)

    def _expected(self, step: int) -> tuple[int | None, int | None]:
        """The piece of the elements before this rank and the piece of the total that arrive in a step."""
        rank, size = self._comm.rank, self._comm.size
        up_to = _index(step - (rank - 1), self._own) if rank else None
        whole = _index(step - (size - 1) - rank, self._own) if rank < size - 1 else None
        return up_to, whole


def _index(number: int, pieces: tuple[torch.Tensor, ...]) -> int | None:
    return number if 0 <= number < len(pieces) else None


def start_two_level(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, hosts: Hosts) -> Finish:
    """Launch the gather inside the host; waiting does the rest and gives the elements before this rank and of all.

    Cost: 3 steps. For G hosts of R ranks: (R - 1) |x| bytes inside the host, (G - 1) |x| / R between hosts and
        2 (R - 1) |x| / R inside again, in 2 (R - 1) + (G - 1) messages; a part carries the weights besides. Where
        hosts differ in size the smallest sets the number of parts. Backward the same.
    Raises: ConfigError unless every rank is on one host and the ranks of a host follow each other.
    """
    if [rank for host in hosts for rank in host] != list(range(comm.size)) or not all(hosts):
        raise ConfigError(
            f"the exchange `two_level` needs hosts of consecutive ranks, 0 to {comm.size - 1} in all, got "
            f"{[list(host) for host in hosts]}; start the ranks host by host, or use another exchange"
        )
    at = next(index for index, host in enumerate(hosts) if comm.rank in host)
    neighbours = [rank for rank in hosts[at] if rank != comm.rank]
    counts = dict.fromkeys(neighbours, 1)
    copies = element_BHX.expand(len(neighbours), *element_BHX.shape)
    launched = collectives.send_receive_start(comm, copies, counts, counts, label=LABEL)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        inside = launched.wait()
        own = hosts[at].index(comm.rank)
        elements = [*inside[:own].unbind(0), element_BHX, *inside[own:].unbind(0)]
        before_BHX = _fold(monoid, elements[:own], element_BHX)
        host_BHX = connected(_fold(monoid, elements, element_BHX), inside)
        before_host_BHX, total_BHX = _between_hosts(comm, monoid, host_BHX, hosts, at)
        return monoid.combine(before_host_BHX, before_BHX), total_BHX

    return finish


def _between_hosts(
    comm: Communicator, monoid: Monoid, host_BHX: torch.Tensor, hosts: Hosts, at: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of the hosts before this one, combined, and those of all hosts."""
    lanes = min(_columns(monoid, host_BHX), *(len(host) for host in hosts))
    parts = split_pieces(monoid, host_BHX, lanes)
    lane = hosts[at].index(comm.rank)
    carries = lane < lanes
    partners = [host[lane] for index, host in enumerate(hosts) if carries and index != at]
    counts = dict.fromkeys(partners, 1)
    empty = parts[0][None][:0]
    sent = rows_of([parts[lane]] * len(partners) if carries else [], empty)
    received = collectives.send_receive(comm, sent, counts, counts, label=LABEL)
    mine: list[torch.Tensor] = []
    if carries:
        of_hosts = [*received[:at].unbind(0), parts[lane], *received[at:].unbind(0)]
        mine = [_fold(monoid, of_hosts[:at], parts[lane]), _fold(monoid, of_hosts, parts[lane])]

    neighbours = [rank for rank in hosts[at] if rank != comm.rank]
    senders = [rank for rank in hosts[at][:lanes] if rank != comm.rank]
    send = dict.fromkeys(neighbours, 2) if carries else {}
    results = collectives.send_receive(
        comm, rows_of(mine * len(neighbours), received), send, dict.fromkeys(senders, 2), label=LABEL
    )
    pairs = [results[2 * i : 2 * i + 2].unbind(0) for i in range(len(senders))]
    if carries:
        pairs.insert(lane, (mine[0], mine[1]))
    columns = host_BHX.shape[-1]
    before_BHX, total_BHX = (join_pieces(monoid, [pair[i] for pair in pairs], columns) for i in (0, 1))
    return connected(before_BHX, results), total_BHX


def _fold(monoid: Monoid, elements: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(like)
    for one in elements:
        total = monoid.combine(total, one)
    return total
