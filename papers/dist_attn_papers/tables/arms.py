"""What was found for arms of an experiment over its seeds: cells and marks of tables, and claims that one is better."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

from benchmarks.measured import Axes, Table
from dist_attn_papers.tables.experiment import Done, Scores
from dist_attn_papers.tables.finding import mean_and_spread

__all__ = [
    "Claim",
    "draw_seeds",
    "first_scores",
    "judge",
    "judged",
    "mark_seeds",
    "minutes_of",
    "of_arm",
    "parameters_of",
]


def of_arm(done: Sequence[Done], arm: str, score: str) -> list[float]:
    """An arm's scores in the order of its seeds, of the seeds that have it."""
    of = sorted((one for one in done if one.arm == arm and score in one.scores), key=lambda one: one.seed)
    return [one.scores[score] for one in of]


def first_scores(done: Sequence[Done], arm: str) -> Scores:
    """All scores of an arm's first seed; none where it is not done yet."""
    return next((one.scores for one in sorted(done, key=lambda one: one.seed) if one.arm == arm), {})


def parameters_of(done: Sequence[Done], arm: str) -> str:
    """The cell with an arm's number of parameters."""
    counted = of_arm(done, arm, "parameters")
    return f"{counted[0]:,.0f}" if counted else "not measured"


def minutes_of(done: Sequence[Done], arm: str) -> str:
    """The cell with the minutes that a job of the arm took."""
    return mean_and_spread([one.seconds / 60 for one in done if one.arm == arm], 1)


def draw_seeds(done: Sequence[Done], arms: Sequence[str], score: str, words: str) -> Callable[[Axes], None]:
    """What draws a panel of one score: every seed of each arm, and their mean."""

    def draw(axes: Axes) -> None:
        mark_seeds(axes, {arm: of_arm(done, arm, score) for arm in arms})
        axes.set_xlabel(f"{words}; every seed, and their mean")

    return draw


def mark_seeds(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    """A line for each arm, the first on top: every seed's value as a dot, and a bar at their mean."""
    for number, values in enumerate(reversed(list(found.values()))):
        axes.plot(values, [number] * len(values), "o", color="C0", alpha=0.6)
        if values:
            axes.plot(sum(values) / len(values), number, "|", color="black", markersize=14)
    axes.set_yticks(range(len(found)), list(found)[::-1], fontsize=7)


# Student's t, two-sided at 5 %, by degrees of freedom; above nine, that of nine.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Claim:
    """What is printed: arm `better` beats arm `worse` by having less of `score`, or with `more` more of it."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("the paper", "first", "second", "difference", "same sign here")

    printed: str
    better: str
    worse: str
    score: str
    more: bool = False


def judge(done: Sequence[Done], claim: Claim) -> tuple[str, ...]:
    """A row under `Claim.COLUMNS`: the difference over the seeds that both arms have, and whether it has the sign.

    A difference whose interval of 95 % (Student's, paired by seed) holds 0 is not told from noise.
    """
    scores = {(one.arm, one.seed): one.scores.get(claim.score) for one in done}
    seeds = sorted({one.seed for one in done})
    pairs = [(scores.get((claim.better, seed)), scores.get((claim.worse, seed))) for seed in seeds]
    sign = -1 if claim.more else 1
    gains = [sign * (worse - better) for better, worse in pairs if better is not None and worse is not None]
    return (claim.printed, claim.better, claim.worse, mean_and_spread(gains), _verdict(gains))


def judged(title: str, done: Sequence[Done], claims: Sequence[Claim]) -> Table:
    """A row for each claim."""
    return Table(title, Claim.COLUMNS, tuple(judge(done, claim) for claim in claims))


def _verdict(gains: Sequence[float]) -> str:
    if not gains:
        return "not measured"
    if not all(map(math.isfinite, gains)):
        return "one of them diverged"
    mean = fmean(gains)
    says = "yes" if mean > 0 else "no, the opposite"
    if len(gains) == 1:
        return f"{says} (one seed)"
    reach = _STUDENT[min(len(gains) - 1, len(_STUDENT)) - 1] * stdev(gains) / math.sqrt(len(gains))
    return says if abs(mean) > reach else "not told from noise"
