"""Results with what a reader needs to judge them: machine, versions, threads, date and commit; filed as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import targets
from benchmarks.cases import OURS, Case, Statistic
from benchmarks.filed import RESULTS, write_page
from benchmarks.measured import Finding, Measured
from benchmarks.memory import peak_bytes
from benchmarks.setting import Setting, look_around
from benchmarks.targets import judge
from benchmarks.timing import MATMUL, RATES, Roofline, Times, interleaved, matmul_flops
from benchmarks.verify import ROOT

__all__ = ["Result", "Row", "file_finding", "measure", "read_finding", "refresh_page", "row_of"]

MEBIBYTE = 1 << 20
_QUANTITIES = (("seconds", 1e3, "ms"), ("peak_bytes", 1 / MEBIBYTE, "MiB above the inputs"))
_STATISTICS: Mapping[Statistic, str] = {"median": "Medians", "fastest": "The fastest"}


@dataclass(frozen=True)
class Row:
    """One size; `peers_over_ours` is how many times longer a peer took, `over_limit` ours against the arithmetic limit.

    Units: seconds, the result's statistic of `rounds` rounds; spread is (slowest - fastest) / median; bytes of tensors
    at the peak; operations and bytes of ours at the least.
    """

    size: int
    seconds: dict[str, float]
    spread: dict[str, float]
    peers_over_ours: dict[str, float]
    over_limit: float
    rounds: int
    flops: float = 0.0
    moved_bytes: float = 0.0
    roofline: Roofline | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A case, measured."""

    case: str
    question: str
    rounds: int
    setting: Setting
    rows: tuple[Row, ...]
    statistic: Statistic = "median"
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Every ratio of every size by its name: what targets and later runs are compared with."""
        found: dict[str, float] = {}
        for row in self.rows:
            found |= {f"{peer} / ours at {row.size}": ratio for peer, ratio in row.peers_over_ours.items()}
            found[f"ours / limit at {row.size}"] = row.over_limit
        return found

    def as_json(self) -> str:
        """The result for machines."""
        judged = {"ratios": self.ratios, "targets": targets.as_json(judge(self.case, self.ratios))}
        return json.dumps({"object": "benchmark", **asdict(self), **judged}, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        peers = list(dict.fromkeys(peer for row in self.rows for peer in row.peers_over_ours))
        peaks = [name for name in (OURS, *peers) if any(name in row.peak_bytes for row in self.rows)]
        header = ["size", "ours", *peers, *(f"{peer} / ours" for peer in peers), "ours / limit", "spread"]
        header += [f"{name}, peak" for name in peaks]
        lines = [
            f"# {self.case}",
            "",
            self.question,
            "",
            f"{self.setting.sentence()} {_STATISTICS[self.statistic]} of {self._rounds()} rounds taken in turns; the "
            "limit is the operations of the form used at the rate of a matrix product in the same run.",
            "",
            f"| {' | '.join(header)} |",
            f"|{'---|' * len(header)}",
        ]
        for row in self.rows:
            cells = [f"{row.size:,}", *(_cell(row.seconds, name, "{:,.2f} ms", 1e3) for name in (OURS, *peers))]
            cells += [_cell(row.peers_over_ours, peer, "{:.2f}") for peer in peers]
            cells += [f"{row.over_limit:.2f}", f"{max(row.spread.values()):.0%}"]
            cells += [_cell(row.peak_bytes, name, "{:,.1f} MiB", 2**-20) for name in peaks]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"* {line}" for line in self._below())]
        judged = targets.as_markdown(judge(self.case, self.ratios))
        return "\n".join(lines) + (f"\n\n{judged}" if judged else "\n")

    def _below(self) -> list[str]:
        """How far ours stays from what the machine can do, and which peers are not there."""
        lines = [
            row.roofline.line(f"{row.size:,}", row.flops, row.moved_bytes, row.seconds[OURS])
            for row in self.rows
            if row.roofline is not None
        ]
        return lines + [f"{peer} was not measured: {reason}." for peer, reason in self.absent.items()]

    def _rounds(self) -> str:
        least = min((row.rounds for row in self.rows), default=self.rounds)
        return str(self.rounds) if least == self.rounds else f"{least} to {self.rounds}"

    def draw(self, path: Path) -> None:
        """Time above, the peak of tensors below where any was measured; both axes logarithmic."""
        from matplotlib.figure import Figure

        measured = [one for one in _QUANTITIES if any(getattr(row, one[0]) for row in self.rows)]
        figure = Figure(figsize=(5.6, 3.6 * len(measured)), layout="constrained")
        axes = figure.subplots(len(measured), 1, squeeze=False, sharex=True)[:, 0]
        for panel, (quantity, factor, unit) in zip(axes, measured, strict=True):
            found = {row.size: getattr(row, quantity) for row in self.rows}
            for name in sorted({name for values in found.values() for name in values} - set(RATES)):
                points = [(size, values[name] * factor) for size, values in found.items() if name in values]
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2 if quantity == "seconds" else 10)
            panel.grid(True, alpha=0.3)
            panel.set_ylabel(unit)
        axes[0].legend(loc="upper left")
        axes[-1].set_xlabel("sequence length")
        figure.suptitle(f"{self.case}, {self.setting.date[:10]}, commit {self.setting.commit}", fontsize=9)
        figure.savefig(path, dpi=110)


def row_of(case: Case, size: int, times: Mapping[str, Times], peaks: Mapping[str, int] | None = None) -> Row:
    """The times and ratios of one size, and the peaks of memory where they were measured."""
    counted = {name: getattr(taken, case.statistic) for name, taken in times.items()}
    ours = counted[OURS]
    limit = case.flops(size) * counted[MATMUL] / matmul_flops()
    return Row(
        size=size,
        seconds=counted,
        spread={name: round(taken.spread, 3) for name, taken in times.items()},
        peers_over_ours={
            name: round(seconds / ours, 3) for name, seconds in counted.items() if name not in (OURS, *RATES)
        },
        over_limit=round(ours / limit, 3),
        rounds=len(times[OURS].seconds),
        flops=case.flops(size),
        moved_bytes=case.moved_bytes(size),
        roofline=Roofline.of(times),
        peak_bytes=dict(peaks or {}),
    )


def _cell(values: Mapping[str, float], name: str, form: str, factor: float = 1.0) -> str:
    """The number as it is written; a dash where there is none."""
    return form.format(values[name] * factor) if name in values else "–"


def read_finding(filed: Mapping[str, Any]) -> Result | Measured:
    """The finding of a filed case or study of this folder."""
    shape: type[Result] | type[Measured] = Result if "rounds" in filed else Measured
    return msgspec.convert(filed, shape, strict=False, str_keys=True)


def file_finding(finding: Finding, folder: Path | None = None) -> Path:
    """Write the finding's JSON into the folder of results, in place of the one before; its path."""
    folder = ROOT / RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{finding.case}.json"
    path.write_text(finding.as_json())
    return path


def refresh_page() -> None:
    """Bring the page of targets up to what is filed."""
    write_page(ROOT)


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Result:
    """Run the case at these sizes."""
    setting = look_around()
    rows = tuple(_measure_size(case, size, rounds) for size in sizes)
    return Result(case.name, case.question, rounds, setting, rows, case.statistic, case.absent())


def _measure_size(case: Case, size: int, rounds: int) -> Row:
    works = case.works(size)
    times = interleaved(works, rounds, budget_s=case.budget_s)
    measured = (name for name in works if name not in RATES) if case.memory else ()
    return row_of(case, size, times, {name: peak_bytes(works[name]) for name in measured})
