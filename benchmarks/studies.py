"""Measurements that are no race of peers at a few sizes: each has its own rows and a figure, and is filed likewise."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import chapter_retrieval, longest_softmax, perplexity_by_position, service_fairness

__all__ = ["STUDIES", "Finding", "Study"]


class Finding(Protocol):
    """What a study has found, for machines, for people, and as a figure."""

    @property
    def name(self) -> str:
        """What its files are called, without the ending."""
        ...

    def as_json(self) -> str: ...

    def as_markdown(self) -> str: ...

    def draw(self, path: Path) -> None:
        """Write the figure, a PNG."""
        ...


@dataclass(frozen=True)
class Study:
    """One study; `measure(smoke)` does little work when it is only asked whether it runs. `tests` are paths."""

    name: str
    tests: tuple[str, ...]
    measure: Callable[[bool], Finding]


_ALL = (
    Study("chapter-retrieval", chapter_retrieval.TESTS, chapter_retrieval.measure),
    Study("longest-softmax", longest_softmax.TESTS, longest_softmax.measure),
    Study("perplexity-by-position", perplexity_by_position.TESTS, perplexity_by_position.measure),
    Study("service-fairness", service_fairness.TESTS, service_fairness.measure),
)
STUDIES = {study.name: study for study in _ALL}
