"""What a study has measured: tables for people, numbers for machines, ratios for targets, curves for the figure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from benchmarks import targets
from benchmarks.setting import Setting, look_around
from benchmarks.targets import Verdict, judge

__all__ = ["Axes", "Finding", "Found", "Measured", "Panel", "Study", "Table", "studies_of"]

Axes = Any
"""matplotlib's, which is optional."""


class Finding(Protocol):
    """What a measurement has found, for machines and for people."""

    @property
    def case(self) -> str:
        """What its file is called, without the ending."""
        ...

    def as_json(self) -> str: ...

    def as_markdown(self) -> str: ...


@dataclass(frozen=True)
class Study:
    """A measurement that is no race of peers at a few sizes; `measure(True)` asks only whether it runs.

    `tests` are paths from the root.
    """

    name: str
    question: str
    tests: tuple[str, ...]
    measure: "Callable[[bool], Finding | Found]"

    def carry_out(self, *, smoke: bool) -> Finding:
        """What it has found, with the setting in which it began."""
        setting = look_around()
        found = self.measure(smoke)
        if not isinstance(found, Found):
            return found
        return Measured(**vars(found), case=self.name, question=self.question, setting=setting, full=not smoke)


def studies_of(*modules: ModuleType) -> dict[str, Study]:
    """By name; each module has NAME, QUESTION, TESTS and `measure`."""
    return {one.NAME: Study(one.NAME, one.QUESTION, one.TESTS, one.measure) for one in modules}


@dataclass(frozen=True)
class Table:
    """Cells as they are printed, under their columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_markdown(self) -> str:
        """The table, with its title above."""
        lines = [f"**{self.title}**", "", _row(self.columns), _row(["---"] * len(self.columns)), *map(_row, self.rows)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Panel:
    """Curves over one quantity: points by the label of their curve."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Mapping[float, float]]

    def draw(self, axes: Axes) -> None:
        """Both axes logarithmic."""
        for label, points in self.curves.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel=self.x, ylabel=self.y)
        axes.set_title(self.title, fontsize=10)
        axes.grid(True, alpha=0.3)
        if self.curves:
            axes.legend(fontsize=8)


@dataclass(frozen=True)
class Found:
    """What a study has found.

    `ratios` are what targets are about, and what later runs are compared with; `numbers` are whatever they were made
    of, in seconds, bytes or counts, as their names say. `absent` names peers that could not run, with the reason.
    """

    tables: tuple[Table, ...]
    ratios: Mapping[str, float]
    numbers: Mapping[str, float]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured(Found):
    """The same with its name, its question, and where and when it was found.

    What is not `full` was only asked whether it runs: targets say nothing about its sizes.
    """

    case: str
    question: str
    setting: Setting
    full: bool = True

    def as_json(self) -> str:
        """The result for machines."""
        head = {"object": "benchmark", "case": self.case, "question": self.question, "setting": asdict(self.setting)}
        values = {**head, **asdict(self), "targets": targets.as_json(self._verdicts)}
        return json.dumps(values, indent=1) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        notes = [*self.notes, *(f"{peer} was not measured: {reason}." for peer, reason in self.absent.items())]
        parts = [
            f"# {self.case}",
            self.question,
            self.setting.sentence(),
            *(table.as_markdown() for table in self.tables),
            "\n".join(f"* {note}" for note in notes),
            targets.as_markdown(self._verdicts).rstrip(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    @property
    def _verdicts(self) -> tuple[Verdict, ...]:
        return judge(self.case, self.ratios) if self.full else ()

    def draw(self, path: Path) -> None:
        """The panels beside each other."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.6 * max(1, len(self.panels)), 4.2), layout="constrained")
        for number, panel in enumerate(self.panels):
            panel.draw(figure.add_subplot(1, len(self.panels), number + 1))
        figure.suptitle(f"{self.case}, {self.setting.date[:10]}, commit {self.setting.commit}", fontsize=9)
        figure.savefig(path, dpi=110)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
