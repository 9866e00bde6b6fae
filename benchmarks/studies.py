"""Measurements that are no race of peers at a few sizes: each has its own rows and a figure, and is filed likewise."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks import (
    busy_ranks,
    chapter_retrieval,
    decoding,
    flat_memory,
    gradient_cost,
    longest_softmax,
    perplexity_by_position,
    prefill,
    scaling,
    service_fairness,
    two_ranks,
    weight_precision,
)

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
    question: str
    tests: tuple[str, ...]
    measure: Callable[[bool], Finding]


_ALL = (
    Study(busy_ranks.NAME, busy_ranks.QUESTION, busy_ranks.TESTS, busy_ranks.measure),
    Study(
        "chapter-retrieval",
        "How well do a document's vectors find its chapters?",
        chapter_retrieval.TESTS,
        chapter_retrieval.measure,
    ),
    Study(decoding.NAME, decoding.QUESTION, decoding.TESTS, decoding.measure),
    Study(flat_memory.NAME, flat_memory.QUESTION, flat_memory.TESTS, flat_memory.measure),
    Study(gradient_cost.NAME, gradient_cost.QUESTION, gradient_cost.TESTS, gradient_cost.measure),
    Study(
        "longest-softmax",
        "How long a sequence fits into 1 GB of tensors per rank, by form of attention?",
        longest_softmax.TESTS,
        longest_softmax.measure,
    ),
    Study(
        "perplexity-by-position",
        "Does a model predict better the more it has read?",
        perplexity_by_position.TESTS,
        perplexity_by_position.measure,
    ),
    Study(prefill.NAME, prefill.QUESTION, prefill.TESTS, prefill.measure),
    Study(scaling.NAME, scaling.QUESTION, scaling.TESTS, scaling.measure),
    Study(
        "service-fairness",
        "What do sessions and jobs get while others are busy?",
        service_fairness.TESTS,
        service_fairness.measure,
    ),
    Study(two_ranks.NAME, two_ranks.QUESTION, two_ranks.TESTS, two_ranks.measure),
    Study(weight_precision.NAME, weight_precision.QUESTION, weight_precision.TESTS, weight_precision.measure),
)
STUDIES = {study.name: study for study in _ALL}
