"""The scan over hosts of several ranks: inside each host, then between hosts with each rank carrying a part."""

from collections.abc import Sequence

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ConfigError
from dist_attn.sharded.prefix_scan.monoid import Monoid, join_pieces, split_pieces
from dist_attn.sharded.prefix_scan.steps import LABEL, Finish, connected, rows_of

__all__ = ["start"]

Hosts = Sequence[Sequence[int]]


def start(comm: Communicator, monoid: Monoid, element_BHX: torch.Tensor, hosts: Hosts) -> Finish:
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
    lanes = min(len(host) for host in hosts)
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
