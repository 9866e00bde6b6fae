"""What was found for one arm of an experiment, over its seeds, and the cells and marks that tables make of it."""

from collections.abc import Mapping, Sequence

from benchmarks.measured import Axes
from dist_attn_research.papers.experiment import Done, Scores
from dist_attn_research.papers.finding import mean_and_spread

__all__ = ["first_scores", "mark_seeds", "minutes_of", "of_arm", "parameters_of"]


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


def mark_seeds(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    """A line for each arm, the first on top: every seed's value as a dot, and a bar at their mean."""
    for number, values in enumerate(reversed(list(found.values()))):
        axes.plot(values, [number] * len(values), "o", color="C0", alpha=0.6)
        if values:
            axes.plot(sum(values) / len(values), number, "|", color="black", markersize=14)
    axes.set_yticks(range(len(found)), list(found)[::-1], fontsize=7)
