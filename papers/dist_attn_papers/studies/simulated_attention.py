"""One layer of causal attention over a cluster, simulated: states are scanned, or heads move, or keys go round."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dist_attn.costs import ScanMessage, default_exchange
from dist_attn.mixers import RandomFeatureConfig
from dist_attn_papers.studies.cluster import Cluster, Times, all_to_all_rounds, play, ring_round, scan_rounds

__all__ = ["FORMS", "OVERLAP_TOKENS", "Shape", "Simulated", "break_even", "simulate"]

CARRY, RESHUFFLE, RING = "states scanned", "heads reshuffled", "keys round a ring"
FORMS = (CARRY, RESHUFFLE, RING)
# The sums of so many tokens are taken while the first step of the scan travels (`dist_attn.sharded.carry_scan`).
OVERLAP_TOKENS = 1024


@dataclass(frozen=True)
class Shape:
    """Attention of one sequence. `element_bytes` are those of queries, keys and values; states travel in float32."""

    heads: int = 16
    head_size: int = 128
    num_random: int = 128
    element_bytes: int = 2

    @property
    def costs(self) -> RandomFeatureConfig:
        """The project's formulas, without a short convolution."""
        sizes = {"hidden_size": self.heads * self.head_size, "num_heads": self.heads, "num_random": self.num_random}
        return RandomFeatureConfig(kind="rfa", short_convolution=0, **sizes)

    @property
    def scanned(self) -> ScanMessage:
        """The state that the ranks scan."""
        message = self.costs.traffic().scanned
        assert message is not None
        return message

    @property
    def width(self) -> int:
        """All heads together."""
        return self.heads * self.head_size

    def kernel_flops(self, ranks: int) -> float:
        """Of a token of kernel attention, features included, projections not."""
        flops = self.costs.prefill_flops(1, ranks)
        return flops.total - flops.projections


@dataclass(frozen=True)
class Simulated:
    """A pass. Units: seconds until the last rank is done, and of the rank that computes most; bytes a rank sends."""

    seconds: float
    compute_s: float
    bytes_sent: float

    @property
    def exposed_s(self) -> float:
        """What the exchanges add."""
        return max(0.0, self.seconds - self.compute_s)

    @property
    def exposed_share(self) -> float:
        """Of the whole."""
        return self.exposed_s / self.seconds if self.seconds else 0.0


def simulate(form: str, tokens: int, cluster: Cluster, shape: Shape) -> Simulated:
    """The forward pass of one layer over `tokens` in even slices.

    The reshuffle computes even shares and holds its tokens back until all heads have come; the ring is given what the
    project's does not do, that a slice travels while the one before is attended to.
    """
    if form == CARRY:
        return _carry(tokens, cluster, shape)
    if form == RESHUFFLE:
        return _reshuffle(tokens, cluster, shape)
    return _ring(tokens, cluster, shape)


def break_even(form: str, cluster: Cluster, shape: Shape, lengths: Sequence[int]) -> int | None:
    """The shortest of `lengths` from which on states take less time in all than this form; None: never."""
    faster = [simulate(CARRY, n, cluster, shape).seconds < simulate(form, n, cluster, shape).seconds for n in lengths]
    slower = [n for n, is_faster in zip(lengths, faster, strict=True) if not is_faster]
    later = [n for n in lengths if not slower or n > max(slower)]
    return min(later) if later else None


def _carry(tokens: int, cluster: Cluster, shape: Shape) -> Simulated:
    ranks, own = cluster.ranks, -(-tokens // cluster.ranks)
    compute_s = own * shape.kernel_flops(ranks) / cluster.flops_per_s
    message = shape.scanned
    rounds = scan_rounds(default_exchange(ranks, cluster.hosts), message, cluster)
    if not rounds:
        return Simulated(compute_s, compute_s, 0.0)
    overlap_s = compute_s * min(1.0, OVERLAP_TOKENS / own)
    launched: Times = np.full(ranks, compute_s - overlap_s)
    # The first step travels while the last tokens are attended to, the others while nothing else is done.
    first = np.maximum(play(rounds[:1], cluster, launched), compute_s)
    seconds = float(play(rounds[1:], cluster, first).max())
    sent: Times = np.zeros(ranks)
    for one in rounds:
        np.add.at(sent, one.senders, one.sizes)
    return Simulated(seconds, compute_s, float(sent.max()))


def _reshuffle(tokens: int, cluster: Cluster, shape: Shape) -> Simulated:
    ranks, own = cluster.ranks, tokens / cluster.ranks
    compute_s = 2.0 * shape.width * tokens * own / cluster.exact_flops_per_s
    there, back = (numbers * own * shape.head_size * shape.element_bytes for numbers in _moved_heads(shape, ranks))
    others = max(1, ranks - 1)
    arrived = play(all_to_all_rounds(ranks, there / others), cluster)
    seconds = float(play(all_to_all_rounds(ranks, back / others), cluster, arrived + compute_s).max())
    return Simulated(seconds, compute_s, there + back)


def _moved_heads(shape: Shape, ranks: int) -> tuple[float, float]:
    """Of each of its tokens a rank sends so many heads of q, k and v, and gets so many outputs from others.

    Where c ranks share a head, each has a part of its queries, folded so that the work is even, and the keys up to the
    last of these: c - (c - 1) / 4 copies of a head's keys. What is kept is the rank's own heads, or its part of one.
    """
    sharing = max(1.0, ranks / shape.heads)
    kept = max(1.0, shape.heads / ranks)
    keys = shape.heads * (sharing - (sharing - 1) / 4)
    return (shape.heads - kept) + 2 * (keys - kept), shape.heads - kept


def _ring(tokens: int, cluster: Cluster, shape: Shape) -> Simulated:
    ranks, own = cluster.ranks, tokens / cluster.ranks
    tile_s = 4.0 * shape.width * own**2 / cluster.exact_flops_per_s
    slice_bytes = 2 * own * shape.width * shape.element_bytes
    one, now = ring_round(ranks, slice_bytes), np.zeros(ranks)
    for number in range(ranks):
        # Rank r has the slice of rank r - number: half of its own, all of earlier ones, nothing of later ones.
        tile = np.where(np.arange(ranks) >= number, tile_s if number else tile_s / 2, 0.0)
        arrived = play([one], cluster, now) if number + 1 < ranks else now
        now = np.maximum(arrived, now + tile)
    return Simulated(float(now.max()), (ranks - 0.5) * tile_s, (ranks - 1) * slice_bytes)
