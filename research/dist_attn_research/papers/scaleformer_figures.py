"""Figures 4 and 5 of Scaleformer with the paper's protocol, extended from 1,024 to 65,536: slopes and crossovers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.measured import Axes, Table
from benchmarks.report import measure
from dist_attn_research.papers.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_research.papers.finding import Report

__all__ = ["SCALEFORMER_FIGURES", "crossover"]

Curve = dict[int, float]


@dataclass(frozen=True)
class Printed:
    """What the figure says: where the linear algorithm overtakes the quadratic form, and milliseconds at 1,024."""

    crossover: str
    naive_ms: int
    linear_ms: float


# Read off the figures: the paper has no table of them.
FIGURES = {
    "scaleformer-4-masked": Printed("128", 240, 25),
    "scaleformer-4-bidirectional": Printed("256", 195, 51),
    "scaleformer-5-masked": Printed("none up to 1,024", 47, 590),
    "scaleformer-5-bidirectional": Printed("64", 22, 2.2),
}
PAPER_END = 1024
FORMS = ("naive", "printed", "ours")


def _jobs(budget: Budget, _: Sequence[int]) -> list[Job]:
    return [_job(name, CASES[name].sizes[:2] if budget.smoke else CASES[name].sizes, budget) for name in FIGURES]


def _job(name: str, sizes: tuple[int, ...], budget: Budget) -> Job:
    rounds = 1 if budget.smoke else CASES[name].rounds

    def work(folder: Path, watch: Watch) -> Scores:
        found = measure(CASES[name], sizes, rounds).numbers
        named = {f"{form}_seconds_at_{size}": f"{form}, seconds at {size}" for size in sizes for form in FORMS}
        return {name: found[measured] for name, measured in named.items() if measured in found}

    return Job(name, 0, {"case": name, "sizes": sizes, "rounds": rounds}, work)


def crossover(slow: Curve, fast: Curve) -> int | None:
    """The first common length from which on `fast` takes less at every longer one; None where there is none."""
    common = sorted(slow.keys() & fast.keys())
    wins = [length for number, length in enumerate(common) if all(fast[n] < slow[n] for n in common[number:])]
    return wins[0] if wins else None


def _curves(one: Done) -> dict[str, Curve]:
    curves: dict[str, Curve] = {form: {} for form in FORMS}
    for name, value in one.scores.items():
        form, _, length = name.partition("_seconds_at_")
        curves[form][int(length)] = value
    return curves


def _report(done: Sequence[Done]) -> Report:
    found = {one.arm: _curves(one) for one in done}
    tables = [_claims(found), *(_table(name, curves) for name, curves in found.items())]
    notes = (
        "Batch 10, one head of 64, horizon 16, uniform inputs, without gradients, one thread; Figure 5's forms divide "
        "by the sums of the scores, Figure 4's do not. The fastest of rounds taken in turns. `printed` is the paper's "
        "own algorithm with its misprints corrected.",
        "A form is left out from where it would hold more than 4 GB. Memory is in the cases of the same names of "
        "`python -m benchmarks.run`.",
    )
    return Report(tuple(tables), notes, tuple((name, _draw(curves)) for name, curves in found.items()))


def _claims(found: dict[str, dict[str, Curve]]) -> Table:
    rows = []
    for name, printed in FIGURES.items():
        curves = found.get(name, {form: {} for form in FORMS})
        naive, theirs, ours = (curves[form] for form in FORMS)
        rows.append(
            (
                name,
                printed.crossover,
                _length(naive, theirs),
                _length(naive, ours),
                f"{printed.naive_ms / printed.linear_ms:.2f}",
                *(_ratio(naive, fast) for fast in (theirs, ours)),
                *(_slope(curve) for curve in (naive, theirs, ours)),
            )
        )
    columns = ["figure", "crossover: paper", "printed, here", "ours"]
    columns += ["naive / linear at 1,024: paper", "printed, here", "ours", "last slope: naive", "printed", "ours"]
    return Table("Where the linear forms win, and how times grow", tuple(columns), tuple(rows))


def _length(slow: Curve, fast: Curve) -> str:
    if not slow or not fast:
        return "not measured"
    length = crossover(slow, fast)
    return "none" if length is None else f"{length:,}"


def _ratio(slow: Curve, fast: Curve) -> str:
    if PAPER_END not in slow or PAPER_END not in fast:
        return "not measured"
    return f"{slow[PAPER_END] / fast[PAPER_END]:.2f}"


def _slope(curve: Curve) -> str:
    """Of the last doubling: 1 is linear, 2 quadratic."""
    if len(curve) < 2:
        return "not measured"
    (shorter, before), (longer, after) = list(pairwise(sorted(curve.items())))[-1]
    return f"{math.log(after / before) / math.log(longer / shorter):.2f}"


def _table(name: str, curves: dict[str, Curve]) -> Table:
    lengths = sorted({length for curve in curves.values() for length in curve})
    rows = [
        (f"{length:,}", *(f"{1e3 * curves[form][length]:,.2f}" if length in curves[form] else "–" for form in FORMS))
        for length in lengths
    ]
    return Table(f"{name}, milliseconds", ("length", *FORMS), tuple(rows))


def _draw(curves: dict[str, Curve]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for form, curve in curves.items():
            axes.loglog(list(curve), list(curve.values()), marker="o", markersize=3, label=form)
        axes.axvline(PAPER_END, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="length", ylabel="seconds")
        axes.legend(fontsize=8)

    return draw


SCALEFORMER_FIGURES = Experiment(
    name="scaleformer-figures",
    question=(
        "Scaleformer, Figures 4 and 5, from 16 to 65,536 tokens: from which length on is the linear algorithm faster "
        "than the quadratic form, as printed and as computed here?"
    ),
    tests=(*CASES["scaleformer-4-masked"].tests, "research/tests/test_paper_times.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)
