"""What an experiment is: jobs that each find some numbers once, and a report made of all of them."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dist_attn_papers.tables.finding import Report

__all__ = [
    "RESULT",
    "Budget",
    "Done",
    "Experiment",
    "Interrupted",
    "Job",
    "Scores",
    "Watch",
    "Work",
    "read_done",
    "read_scores",
]

RESULT = "result.json"
_SAFE = re.compile(r"[A-Za-z0-9._+-]+")

Scores = Mapping[str, float]
"""What a job has found: a number by name, units in the name (`bits_per_byte`, `seconds`)."""


class Interrupted(Exception):
    """The job was asked to stop and has saved what it needs to go on."""


@dataclass(frozen=True)
class Budget:
    """How much work an experiment may be: 1 is what is filed, more trains longer, `smoke` asks only whether it runs."""

    scale: float = 1.0
    smoke: bool = False

    def steps(self, amount: int, *, smoke: int = 2) -> int:
        """That many steps, examples or tokens, scaled."""
        return smoke if self.smoke else max(1, round(amount * self.scale))


class Watch(Protocol):
    """What a job tells while it works, and asks."""

    def stop(self) -> bool:
        """Whether the job is to save itself and raise `Interrupted`."""
        ...

    def tell(self, line: str) -> None:
        """One line about how far it is."""
        ...


Work = Callable[[Path, Watch], Scores]
"""Finds the numbers; the folder is the job's own and keeps what was there when it was interrupted."""


@dataclass(frozen=True)
class Job:
    """One arm of a comparison at one seed. `settings` is all that the numbers depend on, as JSON takes it."""

    arm: str
    seed: int
    settings: Mapping[str, Any]
    work: Work = field(compare=False)
    # Keys of jobs of the same experiment that must be done before this one.
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _SAFE.fullmatch(self.arm):
            raise ValueError(f"arm {self.arm!r} names a folder; letters, digits and ._+- are good for that")

    @property
    def key(self) -> str:
        """Its name, and its folder below the experiment's."""
        return f"{self.arm}/seed-{self.seed}"


@dataclass(frozen=True)
class Done:
    """A job that is done: what it found, and the seconds of clock it took while a command worked at it.

    Time in which the machine itself stood still is among them.
    """

    arm: str
    seed: int
    scores: dict[str, float]
    seconds: float
    settings: dict[str, Any]
    # Where and when, in one line; of the stretch that ended it.
    setting: str


@dataclass(frozen=True)
class Experiment:
    """One table or figure: its jobs for a budget and seeds, and the report of those that are done, perhaps not all."""

    name: str
    question: str
    tests: tuple[str, ...]
    jobs: Callable[[Budget, Sequence[int]], Sequence[Job]]
    report: Callable[[Sequence[Done]], Report]
    seeds: tuple[int, ...] = (0, 1, 2)


def read_scores(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Scores from JSON, where null stands for one that is no number."""
    return {name: math.nan if score is None else score for name, score in scores.items()}


def read_done(folder: Path, job: Job) -> Done | None:
    """What the job has found before, under these settings; None where it is still to be done."""
    try:
        values = json.loads((folder / job.key / RESULT).read_bytes())
    except FileNotFoundError:
        return None
    if values["settings"] != json.loads(json.dumps(job.settings)):
        return None
    return Done(
        job.arm, job.seed, read_scores(values["scores"]), values["seconds"], values["settings"], values["setting"]
    )
