"""A cluster in numbers: ranks that compute and send messages over links with a latency and a bandwidth.

Every message takes latency + bytes / bandwidth of its link (the alpha-beta model), and its sender sends nothing else
meanwhile; a rank goes on to the next round when what it sends has left and what it is sent has come. Each rank has a
port of its own in and out of its host. Nothing else slows a message down, which is what a real network adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_attn.costs import Link, ScanMessage

__all__ = ["Cluster", "Round", "all_to_all_rounds", "play", "ring_round", "scan_rounds"]

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """`ranks` in hosts of `ranks_per_host`, the last of which may be smaller.

    Units: operations a second that one rank reaches in kernel attention and in exact attention.
    """

    ranks: int
    ranks_per_host: int
    inside: Link
    between: Link
    flops_per_s: float
    exact_flops_per_s: float

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each."""
        starts = range(0, self.ranks, self.ranks_per_host)
        return tuple(tuple(range(start, min(self.ranks, start + self.ranks_per_host))) for start in starts)

    def seconds(self, senders: NDArray[np.int64], receivers: NDArray[np.int64], sizes: Times) -> Times:
        """Of a message of so many bytes on the link between each two."""
        same = senders // self.ranks_per_host == receivers // self.ranks_per_host
        inside = self.inside.latency_s + sizes / self.inside.bytes_per_s
        return np.where(same, inside, self.between.latency_s + sizes / self.between.bytes_per_s)


@dataclass(frozen=True)
class Round:
    """Messages that leave together: at most one from each rank. `sizes` are bytes."""

    senders: NDArray[np.int64]
    receivers: NDArray[np.int64]
    sizes: Times

    @staticmethod
    def of(messages: Sequence[tuple[int, int, float]]) -> "Round":
        """From (sender, receiver, bytes)."""
        senders, receivers, sizes = ([m[i] for m in messages] for i in range(3))
        return Round(np.array(senders, np.int64), np.array(receivers, np.int64), np.array(sizes, np.float64))


def play(rounds: Sequence[Round], cluster: Cluster, ready: Times | None = None) -> Times:
    """When each rank is done with all rounds, if it was ready for the first one at `ready`. Units: seconds."""
    now = np.zeros(cluster.ranks) if ready is None else ready
    for one in rounds:
        arrived = now[one.senders] + cluster.seconds(one.senders, one.receivers, one.sizes)
        after = now.copy()
        np.maximum.at(after, one.senders, arrived)
        np.maximum.at(after, one.receivers, arrived)
        now = after
    return now


def ring_round(ranks: int, size: float, distance: int = 1) -> Round:
    """Every rank sends so many bytes to the rank that is `distance` further on."""
    senders = np.arange(ranks)
    return Round(senders, (senders + distance) % ranks, np.full(ranks, float(size)))


def all_to_all_rounds(ranks: int, size: float) -> list[Round]:
    """Every rank sends so many bytes to every other, a round for each distance."""
    return [ring_round(ranks, size, distance) for distance in range(1, ranks)]


def scan_rounds(algorithm: str, message: ScanMessage, cluster: Cluster) -> list[Round]:
    """The messages of the project's scan over ranks, as `dist_attn.sharded.prefix_scan` exchanges them.

    A broadcast of log steps goes down a tree. Raises: ValueError for an algorithm without a plan here.
    """
    ranks, whole = cluster.ranks, message.bytes
    if ranks == 1:
        return []
    if algorithm == "pair":
        return [ring_round(2, whole)]
    if algorithm == "gather":
        return all_to_all_rounds(ranks, whole)
    if algorithm == "log_step":
        return _log_steps(ranks, whole)
    if algorithm == "two_level":
        return _two_level(message, cluster.hosts)
    raise ValueError(f"there is no plan of the exchange {algorithm!r}")


def _log_steps(ranks: int, whole: int) -> list[Round]:
    distances = [1 << step for step in range((ranks - 1).bit_length())]
    rounds = [Round.of([(r, r ^ d, whole) for r in range(ranks) if r ^ d < ranks]) for d in distances]
    if ranks & (ranks - 1):
        # From the last rank: in each step those that have it double, counted from the last one.
        for distance in distances:
            told = [(ranks - 1 - r, ranks - 1 - r - distance, whole) for r in range(min(distance, ranks - distance))]
            rounds.append(Round.of(told))
    return rounds


def _two_level(message: ScanMessage, hosts: Sequence[Sequence[int]]) -> list[Round]:
    lanes, largest = min(len(host) for host in hosts), max(len(host) for host in hosts)
    part = message.piece_bytes(lanes)

    def inside(size: float, senders: int) -> list[Round]:
        """The first `senders` of each host to all its others, by distance."""
        return [
            Round.of(
                [
                    (host[i], host[(i + distance) % len(host)], size)
                    for host in hosts
                    for i in range(min(senders, len(host)))
                    if distance < len(host)
                ]
            )
            for distance in range(1, largest)
        ]

    between = [
        Round.of(
            [
                (host[lane], hosts[(at + distance) % len(hosts)][lane], part)
                for at, host in enumerate(hosts)
                for lane in range(lanes)
            ]
        )
        for distance in range(1, len(hosts))
    ]
    return [*inside(message.bytes, largest), *between, *inside(2 * part, lanes)]
