"""Figures 4 and 5 of Scaleformer with the paper's protocol, extended from 1,024 to 65,536: slopes and crossovers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.cases import Works
from benchmarks.measured import Axes, Table
from benchmarks.memory import peak_bytes
from benchmarks.report import measure
from dist_attn_papers.tables import scaleformer_works
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report
from dist_attn_papers.tables.printed_attention import printed_kernel, printed_positions
from dist_attn_papers.tables.scaleformer_works import CASES

__all__ = ["SCALEFORMER_FIGURES", "crossover", "works"]

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
        case = replace(CASES[name], works=lambda size: works(name, size))
        found = measure(case, sizes, rounds).numbers
        named = {f"{form}_seconds_at_{size}": f"{form}, seconds at {size}" for size in sizes for form in FORMS}
        scores = {name: found[measured] for name, measured in named.items() if measured in found}
        for size in sizes:
            of_forms = {form: one for form, one in case.works(size).items() if form in FORMS}
            scores |= {f"{form}_bytes_at_{size}": float(peak_bytes(one)) for form, one in of_forms.items()}
        return scores

    return Job(name, 0, {"case": name, "sizes": sizes, "rounds": rounds}, work)


def works(name: str, length: int) -> Works:
    """Those of the case, and where it would hold no more than 4 GB the paper's own algorithm."""
    causal, number_bytes = name.endswith("-masked"), scaleformer_works.FLOAT_BYTES * scaleformer_works.BATCH * length
    found = {**CASES[name].works(length)}
    if name.startswith("scaleformer-4"):
        q, v, rp = scaleformer_works.position_inputs(length)
        columns = scaleformer_works.REACH if causal else 2 * scaleformer_works.REACH - 1
        if number_bytes * columns * scaleformer_works.SIZE <= scaleformer_works.MOST_BYTES:
            found["printed"] = lambda: printed_positions(q, v, rp, causal)
        return found
    q, k, v = scaleformer_works.kernel_inputs(length)
    if not causal or 2 * number_bytes * scaleformer_works.SIZE**2 <= scaleformer_works.MOST_BYTES:
        found["printed"] = lambda: printed_kernel(q, k, v, causal)
    return found


def crossover(slow: Curve, fast: Curve) -> int | None:
    """The first common length from which on `fast` takes less at every longer one; None where there is none."""
    common = sorted(slow.keys() & fast.keys())
    wins = [length for number, length in enumerate(common) if all(fast[n] < slow[n] for n in common[number:])]
    return wins[0] if wins else None


def _curves(one: Done, unit: str) -> dict[str, Curve]:
    """Seconds or bytes of every form."""
    curves: dict[str, Curve] = {form: {} for form in FORMS}
    for name, value in one.scores.items():
        form, found, length = name.partition(f"_{unit}_at_")
        if found:
            curves[form][int(length)] = value
    return curves


def _report(done: Sequence[Done]) -> Report:
    found = {one.arm: _curves(one, "seconds") for one in done}
    held = {one.arm: _curves(one, "bytes") for one in done}
    held = {name: curves for name, curves in held.items() if any(curves.values())}  # bytes were not always counted
    tables = [_claims(found), *(_table(f"{name}, milliseconds", curves, 1e3) for name, curves in found.items())]
    tables += [_table(f"{name}, MiB above the inputs", curves, 2.0**-20) for name, curves in held.items()]
    notes = (
        "Batch 10, one head of 64, horizon 16, uniform inputs, without gradients, one thread; Figure 5's forms divide "
        "by the sums of the scores, Figure 4's do not. The fastest of rounds taken in turns. `printed` is the paper's "
        "own algorithm with its misprints corrected.",
        "A form is left out from where it would hold more than 4 GB.",
    )
    panels = [(name, _draw(curves, "seconds")) for name, curves in found.items()]
    panels += [(f"{name}, memory", _draw(curves, "bytes")) for name, curves in held.items()]
    return Report(tuple(tables), notes, tuple(panels))


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


def _table(title: str, curves: dict[str, Curve], scale: float) -> Table:
    lengths = sorted({length for curve in curves.values() for length in curve})
    rows = [
        (f"{length:,}", *(f"{scale * curves[form][length]:,.2f}" if length in curves[form] else "–" for form in FORMS))
        for length in lengths
    ]
    return Table(title, ("length", *FORMS), tuple(rows))


def _draw(curves: dict[str, Curve], unit: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for form, curve in curves.items():
            axes.loglog(list(curve), list(curve.values()), marker="o", markersize=3, label=form)
        axes.axvline(PAPER_END, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="length", ylabel=unit)
        axes.legend(fontsize=8)

    return draw


SCALEFORMER_FIGURES = Experiment(
    name="scaleformer-figures",
    question=(
        "Scaleformer, Figures 4 and 5, from 16 to 65,536 tokens: from which length on is the linear algorithm faster "
        "than the quadratic form, as printed and as computed here?"
    ),
    tests=(
        *CASES["scaleformer-4-masked"].tests,
        "papers/tests/test_paper_times.py",
        "papers/tests/test_attention_peers.py",
    ),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)
