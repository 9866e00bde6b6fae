"""What the machine can do at most: the rate of a matrix product and of a copy, measured in turns with what is judged.

Work of so many operations that moves so many bytes takes no less than the longer of operations / product rate and
bytes / copy rate (Williams, Waterman and Patterson, Roofline).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.timing import Times

__all__ = ["COPY", "MATMUL", "MATMUL_SIZE", "RATES", "Roofline", "matmul_flops", "rate_works"]

MATMUL, COPY = "matmul", "copy"
RATES = (MATMUL, COPY)
"""Names of works that are no peers but measure the machine."""

MATMUL_SIZE = 768
COPY_BYTES = 64 << 20


def matmul_flops(size: int = MATMUL_SIZE) -> float:
    """Operations of the work "matmul"."""
    return 2.0 * size**3


def rate_works(size: int = MATMUL_SIZE, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], object]]:
    """A product of square matrices, and a copy that is larger than caches."""
    a, b = torch.randn(2, size, size, dtype=dtype)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {MATMUL: lambda: a @ b, COPY: lambda: target.copy_(source)}


@dataclass(frozen=True)
class Roofline:
    """The two rates. Units: operations per second; bytes read and written per second."""

    flops_per_s: float
    bytes_per_s: float

    @staticmethod
    def of(times: Mapping[str, Times], size: int = MATMUL_SIZE) -> "Roofline":
        """From the medians of the works above."""
        return Roofline(matmul_flops(size) / times[MATMUL].median, 2 * COPY_BYTES / times[COPY].median)

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
