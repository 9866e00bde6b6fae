"""Times of several pieces of work, taken in turns, so that a change of the machine's speed meets all of them."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Times", "interleaved"]

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
