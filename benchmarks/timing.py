"""Times of works taken in turns, which a change of the machine's speed meets alike, and the machine's own rates.

The rates of a matrix product and of a copy are measured in turns with what is judged. Work of so many operations that
moves so many bytes takes no less than the longer of operations / product rate and bytes / copy rate (Williams,
Waterman and Patterson, Roofline).
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = [
    "COPY",
    "LEAST_ROUNDS",
    "MATMUL",
    "MATMUL_SIZE",
    "RATES",
    "Roofline",
    "Times",
    "interleaved",
    "matmul_flops",
    "rate_works",
]

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Times:
    """The seconds of every round of one piece of work."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The one that other work on the machine disturbed least."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: above one half, something else was running."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def interleaved(
    works: Mapping[str, Callable[[], object]], rounds: int, *, budget_s: float = math.inf
) -> dict[str, Times]:
    """Run each work once uncounted, then `rounds` times in turns, without garbage collection in between.

    Once `budget_s` is spent no further round begins, but there are three, if so many were asked for.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(rounds + 1):
            if number > LEAST_ROUNDS and time.perf_counter() - start > budget_s:
                break
            for name, work in works.items():
                began = time.perf_counter()
                work()
                if number:
                    taken[name].append(time.perf_counter() - began)
    finally:
        gc.enable()
    return {name: Times(tuple(seconds)) for name, seconds in taken.items()}


MATMUL, COPY = "matmul", "copy"
RATES = (MATMUL, COPY)
"""Names of works that are no peers but measure the machine."""

MATMUL_SIZE = 768
COPY_BYTES = 64 << 20


def matmul_flops() -> float:
    """Operations of the work "matmul"."""
    return 2.0 * MATMUL_SIZE**3


def rate_works(dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], object]]:
    """A product of square matrices, and a copy that is larger than caches."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=dtype)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {MATMUL: lambda: a @ b, COPY: lambda: target.copy_(source)}


@dataclass(frozen=True)
class Roofline:
    """The two rates. Units: operations per second; bytes read and written per second."""

    flops_per_s: float
    bytes_per_s: float

    @staticmethod
    def of(times: Mapping[str, Times]) -> "Roofline":
        """From the medians of the works above."""
        return Roofline(matmul_flops() / times[MATMUL].median, 2 * COPY_BYTES / times[COPY].median)

    def least_seconds(self, flops: float, moved_bytes: float) -> float:
        """What work of this size takes at least."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)

    def line(self, what: str, flops: float, moved_bytes: float, seconds: float) -> str:
        """The work, both rates and how far from the roof it stayed, in one sentence."""
        least = self.least_seconds(flops, moved_bytes)
        bound = "arithmetic" if flops / self.flops_per_s >= moved_bytes / self.bytes_per_s else "memory"
        return (
            f"Roofline, {what}: {flops / 1e9:,.3g} GFLOP and {moved_bytes / 1e6:,.3g} MB at the least; a product ran "
            f"at {self.flops_per_s / 1e9:,.3g} GFLOP/s and a copy at {self.bytes_per_s / 1e9:,.3g} GB/s, so "
            f"{1e3 * least:,.3g} ms (bound by {bound}); it took {seconds / least:.2f} times that."
        )
