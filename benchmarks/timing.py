"""Times of several pieces of work, taken in turns, so that a change of the machine's speed meets all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Times", "interleaved"]


@dataclass(frozen=True)
class Times:
    """The seconds of every round of one piece of work."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: above one half, something else was running."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def interleaved(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Run each work once uncounted, then `rounds` times in turns, without garbage collection in between."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name, work in works.items():
                began = time.perf_counter()
                work()
                if number:
                    taken[name].append(time.perf_counter() - began)
    finally:
        gc.enable()
    return {name: Times(tuple(seconds)) for name, seconds in taken.items()}
