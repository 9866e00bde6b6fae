"""Measurements that are no race of peers at a few sizes: each has its own rows and a figure, and is filed likewise."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from benchmarks import busy_ranks, decoding, delta, flat_memory, gradient_cost, prefill, two_ranks

__all__ = ["STUDIES", "Drawn", "Finding", "Study"]


class Finding(Protocol):
    """What a measurement has found, for machines and for people."""

    @property
    def case(self) -> str:
        """What its file is called, without the ending."""
        ...

    def as_json(self) -> str: ...

    def as_markdown(self) -> str: ...


@runtime_checkable
class Drawn(Finding, Protocol):
    """A finding that has a figure too."""

    def draw(self, path: Path) -> None:
        """Write the figure, a PNG."""
        ...


@dataclass(frozen=True)
class Study:
    """One study; `measure(smoke)` does little work when it is only asked whether it runs. `tests` are paths."""

    name: str
    question: str
    tests: tuple[str, ...]
    measure: Callable[[bool], Finding]


STUDIES = {
    module.NAME: Study(module.NAME, module.QUESTION, module.TESTS, module.measure)
    for module in (busy_ranks, decoding, delta, flat_memory, gradient_cost, prefill, two_ranks)
}
