"""Results with what a reader needs to judge them: machine, versions, threads, date and commit; JSON and Markdown."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import performance_page, targets
from benchmarks.cases import OURS, Case, Statistic
from benchmarks.figures import draw
from benchmarks.filed import RESULTS
from benchmarks.roofline import MATMUL, RATES, Roofline, matmul_flops
from benchmarks.setting import Setting, look_around
from benchmarks.studies import Finding
from benchmarks.targets import judge
from benchmarks.timing import Times
from benchmarks.verify import ROOT

__all__ = [
    "Result",
    "Row",
    "Setting",
    "as_markdown",
    "file_finding",
    "file_result",
    "look_around",
    "refresh_page",
    "row_of",
]

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

    @property
    def name(self) -> str:
        """What its files are called, without the ending."""
        return f"{self.case}-{self.setting.date[:10]}-{self.setting.commit}"


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


def as_json(result: Result) -> str:
    """The result for machines."""
    judged = {"ratios": result.ratios, "targets": targets.as_json(judge(result.case, result.ratios))}
    return json.dumps({"object": "benchmark", **asdict(result), **judged}, indent=2) + "\n"


def as_markdown(result: Result) -> str:
    """The result for people."""
    peers = list(dict.fromkeys(peer for row in result.rows for peer in row.peers_over_ours))
    peaks = [name for name in (OURS, *peers) if any(name in row.peak_bytes for row in result.rows)]
    header = ["size", "ours", *peers, *(f"{peer} / ours" for peer in peers), "ours / limit", "spread"]
    header += [f"{name}, peak" for name in peaks]
    lines = [
        f"# {result.case}",
        "",
        result.question,
        "",
        f"{result.setting.sentence()} {_STATISTICS[result.statistic]} of {_rounds(result)} rounds taken in turns; the "
        "limit is the operations of the form used at the rate of a matrix product in the same run.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
    ]
    for row in result.rows:
        cells = [f"{row.size:,}", *(_cell(row.seconds, name, "{:,.2f} ms", 1e3) for name in (OURS, *peers))]
        cells += [_cell(row.peers_over_ours, peer, "{:.2f}") for peer in peers]
        cells += [f"{row.over_limit:.2f}", f"{max(row.spread.values()):.0%}"]
        cells += [_cell(row.peak_bytes, name, "{:,.1f} MiB", 2**-20) for name in peaks]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"* {line}" for line in _below(result))]
    return "\n".join(lines) + "\n" + _judged(result)


def _below(result: Result) -> list[str]:
    """How far ours stays from what the machine can do, and which peers are not there."""
    lines = [
        row.roofline.line(f"{row.size:,}", row.flops, row.moved_bytes, row.seconds[OURS])
        for row in result.rows
        if row.roofline is not None
    ]
    return lines + [f"{peer} was not measured: {reason}." for peer, reason in result.absent.items()]


def _judged(result: Result) -> str:
    table = targets.as_markdown(judge(result.case, result.ratios))
    return f"\n{table}" if table else ""


def _cell(values: Mapping[str, float], name: str, form: str, factor: float = 1.0) -> str:
    """The number as it is written; a dash where there is none."""
    return form.format(values[name] * factor) if name in values else "–"


def _rounds(result: Result) -> str:
    least = min((row.rounds for row in result.rows), default=result.rounds)
    return str(result.rounds) if least == result.rounds else f"{least} to {result.rounds}"


def file_result(result: Result, folder: Path | None = None) -> Path:
    """Write both forms and the figure into the folder of results; the path of the Markdown."""
    for_machines = as_json(result)
    path = _file(result.name, for_machines, as_markdown(result) + f"\n![]({result.name}.png)\n", folder)
    draw([json.loads(for_machines)], path.with_suffix(".png"))
    return path


def file_finding(finding: Finding, folder: Path | None = None) -> Path:
    """The same for a study, with its figure."""
    path = _file(finding.name, finding.as_json(), finding.as_markdown() + f"\n![]({finding.name}.png)\n", folder)
    finding.draw(path.with_suffix(".png"))
    return path


def refresh_page() -> None:
    """Bring the page of targets up to what is filed."""
    performance_page.write(ROOT, RESULTS)


def _file(name: str, for_machines: str, for_people: str, folder: Path | None) -> Path:
    folder = ROOT / RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(for_machines)
    path = folder / f"{name}.md"
    path.write_text(for_people)
    return path
