"""Beyond this machine: passes measured on 1, 2 and 4 ranks, and a simulation of up to 1,024 GPUs held against them."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.measured import Found, Panel, Table
from benchmarks.rank_passes import Pass, Passed, on_ranks, run_passes
from benchmarks.setting import own_cores
from dist_attn.comm import Communicator
from dist_attn.costs import Link, default_exchange
from dist_attn_papers.studies.cluster import Cluster, play, scan_rounds
from dist_attn_papers.studies.simulated_attention import FORMS, Shape, Simulated, break_even, simulate

__all__ = ["NAME", "QUESTION", "TESTS", "Point", "gpus", "measure", "points_of", "told"]

NAME = "scaling"
QUESTION = (
    "What do ranks cost and gain: processor time, bytes and waiting on 1, 2 and 4 ranks of this machine, and in a "
    "simulation 8 to 1,024 GPUs with 1M to 1B tokens, against moving heads and passing keys round?"
)
TESTS = ("papers/tests/test_scaling.py", "tests/costs/test_scans.py", "tests/sharded/test_carry_scan.py")
RANKS, LENGTH, ROUNDS = (1, 2, 4), 32_768, 5
SMOKE_LENGTH = 256
SMALL_BYTES, LARGE_BYTES, SWAPS = 4 << 10, 4 << 20, 15
HERE = Shape(heads=8, head_size=64, num_random=64, element_bytes=4)

GPUS, TOKENS = (8, 64, 256, 1024), (1 << 20, 1 << 24, 1 << 28, 1 << 30)
SMOKE_GPUS, SMOKE_TOKENS = (8, 16), (1 << 20, 1 << 22)
BREAK_EVENS = tuple(1 << power for power in range(10, 31))
# Assumed, not measured: an H200 that reaches 20 % of its 989 TFLOP/s in kernel attention and 60 % in exact attention,
# NVLink of 450 GB/s and a port of 400 Gb/s between hosts, each way.
GPU_FLOPS, GPU_EXACT_FLOPS = 200e12, 600e12
NVLINK, NETWORK = Link(latency_s=5e-6, bytes_per_s=400e9), Link(latency_s=10e-6, bytes_per_s=45e9)
GPUS_PER_HOST = 8
IN_ALL, EXCHANGES = "in all", "exchanges alone"
EXCHANGES_PLAYED = ("gather", "log_step", "two_level")


@dataclass(frozen=True)
class Point:
    """So many ranks, measured and simulated. Units: seconds of the slowest rank, bytes of the one that sends most."""

    ranks: int
    seconds: float
    cpu_s: float
    exposed_share: float
    bytes_sent: int
    simulated: Simulated

    @property
    def time_ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated.seconds / self.seconds


def gpus(ranks: int) -> Cluster:
    """Hosts of eight."""
    return Cluster(ranks, GPUS_PER_HOST, NVLINK, NETWORK, GPU_FLOPS, GPU_EXACT_FLOPS)


def measure(smoke: bool) -> Found:
    """Measure, hold the simulation against it, and simulate what there is no machine for."""
    length, rounds = (SMOKE_LENGTH, 1) if smoke else (LENGTH, ROUNDS)
    passed = {ranks: run_passes([Pass(length, alone=False)], ranks, rounds)[0] for ranks in RANKS}
    link = measured_link()
    points = points_of(passed, length, link, len(own_cores()))
    counts, tokens = (SMOKE_GPUS, SMOKE_TOKENS) if smoke else (GPUS, TOKENS)
    simulated = {
        (form, ranks, n): simulate(form, n, gpus(ranks), Shape()) for form in FORMS for ranks in counts for n in tokens
    }
    evens = _break_evens(counts, BREAK_EVENS[::4] if smoke else BREAK_EVENS)
    ratios = {f"simulated / measured seconds, {p.ranks} ranks": round(p.time_ratio, 3) for p in points}
    ratios |= {
        f"simulated / measured bytes, {p.ranks} ranks": p.simulated.bytes_sent / p.bytes_sent
        for p in points
        if p.bytes_sent
    }
    numbers = {"link latency, seconds": link.latency_s, "link bytes per second": link.bytes_per_s}
    numbers |= {f"{form}, {ranks} GPUs, {n} tokens, seconds": s.seconds for (form, ranks, n), s in simulated.items()}
    for point in points:
        numbers |= {
            f"{point.ranks} ranks, seconds": point.seconds,
            f"{point.ranks} ranks, processor seconds": point.cpu_s,
            f"{point.ranks} ranks, exposed share": point.exposed_share,
            f"{point.ranks} ranks, bytes sent": point.bytes_sent,
        }
    longest = max(tokens)
    curves = {form: {float(r): simulated[form, r, longest].seconds for r in counts} for form in FORMS}
    here = {
        "measured": {float(p.ranks): p.seconds for p in points},
        "simulated": {float(p.ranks): p.simulated.seconds for p in points},
    }
    panels = (
        Panel(f"this machine, {length:,} tokens", "ranks", "seconds", here),
        Panel(f"simulated GPUs, {longest:,} tokens", "GPUs", "seconds a layer", curves),
    )
    tables = (
        _measured_table(points),
        _simulated_table(simulated, counts, tokens),
        _even_table(evens, counts),
        _scan_table(counts),
    )
    return Found(tables, ratios, numbers, panels, _notes(link, length))


def measured_link() -> Link:
    """What messages between two ranks of this machine take: swaps of two sizes, medians."""
    small_s, large_s = on_ranks(_swaps, 2)[0]
    rate = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return Link(latency_s=max(small_s - SMALL_BYTES / rate, 1e-9), bytes_per_s=rate)


def _swaps(comm: Communicator) -> tuple[float, float]:
    other, found = {1 - comm.rank: 1}, []
    for size in (SMALL_BYTES, LARGE_BYTES):
        message, taken = torch.zeros(1, size, dtype=torch.uint8), []
        for _ in range(SWAPS + 1):
            began = time.perf_counter()
            comm.send_receive(message, other, other)
            taken.append(time.perf_counter() - began)
        found.append(statistics.median(taken[1:]))
    return found[0], found[1]


def points_of(passed: dict[int, list[Passed]], length: int, link: Link, cores: int) -> list[Point]:
    """Every measured number of ranks beside its simulation, whose one rate is that of one rank here.

    Ranks that share a core take turns on it.
    """
    one = statistics.median(passed[1][0].cpu_s)
    rate = length * HERE.kernel_flops(1) / one
    points = []
    for ranks, of_ranks in passed.items():
        flops_per_s = rate * min(1.0, cores / ranks)
        cluster = Cluster(ranks, ranks, link, link, flops_per_s, flops_per_s)
        points.append(
            Point(
                ranks=ranks,
                seconds=statistics.median(max(r) for r in zip(*(p.together_s for p in of_ranks), strict=True)),
                cpu_s=sum(statistics.median(p.cpu_s) for p in of_ranks),
                exposed_share=max(p.exposed_share for p in of_ranks),
                bytes_sent=max(p.bytes_sent for p in of_ranks),
                simulated=simulate(FORMS[0], length, cluster, HERE),
            )
        )
    return points


def _measured_table(points: Sequence[Point]) -> Table:
    rows = tuple(
        (
            str(p.ranks),
            f"{p.seconds:.3f} s",
            f"{p.simulated.seconds:.3f} s",
            f"{p.time_ratio:.2f}",
            f"{p.cpu_s:.3f} s",
            f"{p.bytes_sent:,}",
            f"{p.simulated.bytes_sent:,.0f}",
            f"{p.exposed_share:.1%}",
            f"{p.simulated.exposed_share:.1%}",
        )
        for p in points
    )
    columns = ("ranks", "time", "time, simulated", "simulated / measured", "processor time of all", "sent by a rank")
    return Table("Measured here", (*columns, "sent, simulated", "exposed", "exposed, simulated"), rows)


def _simulated_table(
    simulated: dict[tuple[str, int, int], Simulated], counts: Sequence[int], tokens: Sequence[int]
) -> Table:
    rows = []
    for ranks in counts:
        for n in tokens:
            of_forms = [simulated[form, ranks, n] for form in FORMS]
            cells = [told(one.seconds) for one in of_forms]
            rows.append((str(ranks), f"{n:,}", *cells, *(f"{one.exposed_share:.1%}" for one in of_forms)))
    columns = ("GPUs", "tokens", *FORMS, *(f"{form}, exposed" for form in FORMS))
    return Table("Simulated: one layer forward, 16 heads of 128, 256 features, bf16", columns, tuple(rows))


def _break_evens(counts: Sequence[int], lengths: Sequence[int]) -> dict[tuple[str, str, int], str]:
    """By what is compared, form and ranks: from how many tokens on states are ahead, in words."""
    found = {}
    for ranks in counts:
        # With nothing to compute only the exchanges are left.
        exchanges = replace(gpus(ranks), flops_per_s=math.inf, exact_flops_per_s=math.inf)
        for what, cluster in ((IN_ALL, gpus(ranks)), (EXCHANGES, exchanges)):
            for form in FORMS[1:]:
                least = break_even(form, cluster, Shape(), lengths)
                word = "never" if least is None else f"{least:,}"
                found[what, form, ranks] = f"{word} or fewer" if least == lengths[0] else word
    return found


def _even_table(evens: dict[tuple[str, str, int], str], counts: Sequence[int]) -> Table:
    rows = tuple(
        (str(ranks), *(evens[what, form, ranks] for form in FORMS[1:] for what in (IN_ALL, EXCHANGES)))
        for ranks in counts
    )
    columns = ("GPUs", *(f"against {form}, {what}" for form in FORMS[1:] for what in (IN_ALL, EXCHANGES)))
    return Table("Simulated: tokens from which on states take less time (powers of two)", columns, rows)


def _scan_table(counts: Sequence[int]) -> Table:
    """The scan of states alone by every exchange that the simulation plays; the project's choice first."""
    message, rows = Shape().scanned, []
    for ranks in counts:
        cluster = gpus(ranks)
        seconds = {name: float(play(scan_rounds(name, message, cluster), cluster).max()) for name in EXCHANGES_PLAYED}
        chosen = default_exchange(ranks, cluster.hosts)
        rows.append((str(ranks), chosen, *(told(taken) for taken in seconds.values())))
    return Table("Simulated: the scan of states alone", ("GPUs", "chosen", *EXCHANGES_PLAYED), tuple(rows))


def told(seconds: float) -> str:
    """In a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _notes(link: Link, length: int) -> tuple[str, ...]:
    return (
        f"Measured: {length:,} tokens at the reference shape, B1 H8 d64, float32, forward, cut into even slices; ranks "
        "are processes over gloo with a thread each, on a core each as far as there are cores. A message here takes "
        f"{1e6 * link.latency_s:.0f} µs and {link.bytes_per_s / 1e9:.2f} GB/s, measured in the same run.",
        "The simulation has one rate, that of one rank here (its operations over its processor time), and the "
        "operations of the cost formulas, which let each of several ranks read its keys twice.",
        f"Simulated GPUs are assumptions, not measurements: {GPU_FLOPS / 1e12:.0f} TFLOP/s in kernel attention, "
        f"{GPU_EXACT_FLOPS / 1e12:.0f} in exact attention, {NVLINK.bytes_per_s / 1e9:.0f} GB/s and "
        f"{1e6 * NVLINK.latency_s:.0f} µs inside a host of {GPUS_PER_HOST}, {NETWORK.bytes_per_s / 1e9:.0f} GB/s and "
        f"{1e6 * NETWORK.latency_s:.0f} µs between hosts, no contention. States are scanned as the project chooses; a "
        "reshuffle computes even shares; a ring sends while it computes, and its last rank sees everything.",
    )
