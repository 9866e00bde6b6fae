"""What an experiment reports: tables of cells for people, every number for machines, and a figure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.measured import Axes, Table
from benchmarks.setting import Setting

__all__ = ["Report", "TableFinding", "mean_and_spread"]


@dataclass(frozen=True)
class Report:
    """Tables, what is to be said about them, and panels of one figure: a title, and what draws into its axes."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    panels: tuple[tuple[str, Callable[[Axes], None]], ...] = ()


@dataclass(frozen=True)
class TableFinding:
    """A report with the question it answers, and where, when and by which command."""

    experiment: str
    question: str
    command: str
    setting: Setting
    report: Report
    # Of every job: arm, seed, scores, seconds, settings, setting.
    numbers: Sequence[Mapping[str, Any]]

    @property
    def case(self) -> str:
        """What its file is called, without the ending."""
        return f"paper-{self.experiment}"

    def as_json(self) -> str:
        """The result for machines."""
        values = {
            "object": "benchmark",
            "case": f"paper-{self.experiment}",
            "question": self.question,
            "command": self.command,
            "setting": asdict(self.setting),
            "tables": [asdict(table) for table in self.report.tables],
            "notes": self.report.notes,
            "numbers": [_without_nan(number) for number in self.numbers],
        }
        return json.dumps(values, indent=1) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        parts = [
            f"# {self.experiment}",
            self.question,
            f"`{self.command}`; put together {self.setting.date} at commit {self.setting.commit}. {self._common()}",
            *(table.as_markdown() for table in self.report.tables),
            "\n".join(f"* {note}" for note in self.report.notes),
            f"{len(self.numbers)} jobs, {sum(number['seconds'] for number in self.numbers) / 60:.0f} minutes in all.",
            self._origins().as_markdown(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _common(self) -> str:
        """What all jobs were measured with: a result may be made of jobs of several commits and machines."""
        first, *others = [_parts(number["setting"]) for number in self.numbers]
        common = [part for part in first[1:] if all(part in other for other in others)]
        return f"All jobs: {', '.join(common)}." if common else ""

    def _origins(self) -> Table:
        """The commit and machine of every job, the seeds of an arm together where they are the same."""
        seeds: dict[tuple[str, str, str], list[str]] = {}
        for number in self.numbers:
            _, commit, machine, *_ = _parts(number["setting"])
            where = (number["arm"], commit.removeprefix("commit "), machine)
            seeds.setdefault(where, []).append(str(number["seed"]))
        rows = [(arm, ", ".join(found), *where) for (arm, *where), found in seeds.items()]
        return Table("Where each job was measured", ("job", "seeds", "commit", "machine"), tuple(rows))

    def draw(self, path: Path) -> None:
        """The panels beside each other, at most three in a row, and four in two rows."""
        from matplotlib.figure import Figure

        columns = 2 if len(self.report.panels) == 4 else max(1, min(3, len(self.report.panels)))
        rows = max(1, -(-len(self.report.panels) // columns))
        figure = Figure(figsize=(5.2 * columns, 4.0 * rows), layout="constrained")
        for number, (title, draw) in enumerate(self.report.panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            draw(axes)
            axes.set_title(title, fontsize=10)
            axes.grid(True, alpha=0.3)
            _write_out_ticks(axes)
        figure.suptitle(f"{self.experiment}, put together {self.setting.date[:10]}", fontsize=9)
        figure.savefig(path, dpi=110)


def _write_out_ticks(axes: Axes) -> None:
    """Numbers at the ticks of logarithmic axes as people write them (2,048, not 2^11), and several to a short axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis, scale, (low, high) in (
        (axes.xaxis, axes.get_xscale(), axes.get_xlim()),
        (axes.yaxis, axes.get_yscale(), axes.get_ylim()),
    ):
        if scale != "log":
            continue
        if axis.get_transform().base == 10 and high < 1000 * low:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axis.set_minor_formatter(NullFormatter())


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """`12.34 ± 0.05 (3)`: mean, standard deviation over seeds and their number; one value stands alone.

    Where some are no numbers, as of a run that diverged, only how many.
    """
    if not values:
        return "not measured"
    if lost := sum(not isfinite(value) for value in values):
        return f"no number in {lost} of {len(values)}"
    if len(values) == 1:
        return f"{values[0]:.{digits}f} (1)"
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f} ({len(values)})"


def _without_nan(number: Mapping[str, Any]) -> dict[str, Any]:
    """A job's numbers, with null for a score that is none: JSON has no NaN."""
    scores = {name: value if isfinite(value) else None for name, value in number["scores"].items()}
    return {**number, "scores": scores}


def _parts(setting: str) -> list[str]:
    """The parts of `Setting.sentence`: date, commit, machine and the others; cores in brackets are one part."""
    return re.split(r", (?![^(]*\))", setting.removesuffix("."))
