"""Unified View, Eq. 28: a Selector that learns against the likelihood, and what becomes of it, beside Eq. 27."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.measured import Axes, Table
from dist_attn_papers.tables.arms import of_arm
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.needle_training import COPIES, SYMBOLS, Stage, needles_job, needles_run
from dist_attn_papers.tables.needles import MODELS, SPARSE

__all__ = ["SELECTOR_COLLAPSE"]

LENGTH, BATCH, HELD_OUT, LOOKS = 32, 8, 200, 8
FIRST, LEARN, AGAIN = 480, 400, 320  # multiples of LOOKS
RATE = {"rate": 0.3}
# What the Selector learns for in the second stage, and how its share is held.
ARMS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "likelihood": ("Eq. 27, with the rate term", "likelihood", RATE),
    "likelihood-free": ("Eq. 27 without a rate term", "likelihood", {**RATE, "rate_weight": 0.0}),
    "adversarial": ("Eq. 28, with the rate term", "adversarial", {**RATE, "rate_penalty": "around"}),
    "adversarial-free": ("Eq. 28 as printed, without a rate term", "adversarial", {**RATE, "rate_weight": 0.0}),
}


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    steps = [budget.steps(count, smoke=2) for count in (FIRST, LEARN, AGAIN)]
    stages = tuple(
        Stage(LENGTH, BATCH, count, rate, selector)
        for count, rate, selector in zip(
            steps, (1e-2, 3e-3, 3e-3), ({"frozen": True}, {}, {"frozen": True}), strict=True
        )
    )
    held_out = 4 if budget.smoke else HELD_OUT
    jobs = []
    for seed in seeds:
        for arm, (_, objective, selector) in ARMS.items():
            models = (
                _model("likelihood", {"frozen": True}),
                _model(objective, selector),
                _model("likelihood", {**selector, "frozen": True}),
            )
            sections = [
                needles_run(model, seed, number, stage, held_out, looks=min(LOOKS, stage.steps))
                for number, (model, stage) in enumerate(zip(models, stages, strict=True))
            ]
            jobs.append(needles_job(arm, seed, sections, stages))
    return jobs


def _model(objective: str, selector: Mapping[str, Any]) -> dict[str, Any]:
    base = MODELS[SPARSE]
    return {**base, "objective": objective, "selector": {**base["selector"], **selector}}


def _series(one: Done, what: str) -> dict[int, float]:
    """By the step of the whole curriculum."""
    name = f"{what}_at_step_"
    return {int(key.removeprefix(name)): value for key, value in sorted(one.scores.items()) if key.startswith(name)}


def _ends(one: Done) -> tuple[int, ...]:
    """The steps at which the stages end."""
    ends, at = [], 0
    for stage in one.settings["stages"]:
        at += stage["run"]["steps"]
        ends.append(at)
    return tuple(ends)


def _report(done: Sequence[Done]) -> Report:
    rows = []
    for arm, (words, *_) in ARMS.items():
        mine = [one for one in done if one.arm == arm]
        cells = []
        for what in ("kept", "accuracy"):
            for number in range(3):
                found = [100 * _series(one, what)[_ends(one)[number]] for one in mine]
                cells.append(mean_and_spread(found, 1) if found else "not measured")
        rows.append((words, *cells))
    columns = ["the Selector's objective"]
    columns += [f"{what} {when}" for what in ("kept, %,", "right, %,") for when in ("before", "after", "trained again")]
    seeds = max((len(of_arm(done, arm, f"accuracy_{LENGTH}")) for arm in ARMS), default=0)
    title = f"Needles in {LENGTH} tokens, {HELD_OUT} held-out sequences, {seeds} seeds"
    panels = (("share kept, %", _draw(done, "kept")), ("right, %", _draw(done, "accuracy")))
    return Report((Table(title, tuple(columns), tuple(rows)),), NOTES, panels)


def _draw(done: Sequence[Done], what: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for arm, (words, *_) in ARMS.items():
            series = [_series(one, what) for one in done if one.arm == arm]
            steps = sorted(set.intersection(*(set(one) for one in series))) if series else []
            axes.plot(steps, [100 * fmean(one[step] for one in series) for step in steps], marker=".", label=words)
        for end in _ends(done[0])[:2] if done else ():
            axes.axvline(end, color="black", linewidth=0.8)
        axes.set_xlabel("steps; a new stage at each line")
        axes.legend(fontsize=7)

    return draw


NOTES = (
    f"{SYMBOLS} kinds of needles in {COPIES} copies each. First the classifier learns with everything kept "
    f"({FIRST} steps of {BATCH}), then the Selector learns too ({LEARN}), then the classifier learns once more under a "
    f"Selector that stays ({AGAIN}), which is what the paper does against a Selector that has become too powerful.",
    "Guessing is right in a quarter of the sequences. Kept shares are of held-out sequences, at the threshold.",
)

SELECTOR_COLLAPSE = Experiment(
    "uv-collapse",
    "Unified View, Eq. 28: does a Selector that learns against the likelihood win, and does training again mend it?",
    ("papers/tests/test_million_task.py", "papers/tests/test_papers_needles.py"),
    _jobs,
    _report,
)
