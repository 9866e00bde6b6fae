"""Cases, measured: the works of every size in turns, as one finding; and findings, filed as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases import OURS, Case
from benchmarks.filed import RESULTS, write_page
from benchmarks.measured import Finding, Measured, Panel, Table
from benchmarks.memory import peak_bytes
from benchmarks.setting import ROOT, Setting, look_around
from benchmarks.timing import MATMUL, RATES, Roofline, Times, interleaved, matmul_flops

__all__ = ["SizeMeasured", "file_finding", "finding_of", "measure", "read_finding", "refresh_page"]

MEBIBYTE = 1 << 20
_STATISTICS = {"median": "Medians", "fastest": "The fastest"}


@dataclass(frozen=True)
class SizeMeasured:
    """One size of a case: times of all works, and the peak of tensors above the inputs where the case asks for it."""

    times: Mapping[str, Times]
    peak_bytes: Mapping[str, int]


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Measured:
    """Run the case at these sizes."""
    setting = look_around()
    return finding_of(case, setting, rounds, {size: _measure_size(case, size, rounds) for size in sizes})


def _measure_size(case: Case, size: int, rounds: int) -> SizeMeasured:
    works = case.works(size)
    times = interleaved(works, rounds, budget_s=case.budget_s)
    measured = (name for name in works if name not in RATES) if case.memory else ()
    return SizeMeasured(times, {name: peak_bytes(works[name]) for name in measured})


def finding_of(case: Case, setting: Setting, rounds: int, found: Mapping[int, SizeMeasured]) -> Measured:
    """Peers over ours, ours over the arithmetic limit, and how far ours stays from what the machine can do."""
    seconds = {
        size: {name: float(getattr(times, case.statistic)) for name, times in one.times.items()}
        for size, one in found.items()
    }
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    notes = ["Rounds are taken in turns; the limit is the operations of the form used at the rate of a matrix product."]
    for size, of in seconds.items():
        ratios |= {f"{name} / ours at {size}": round(of[name] / of[OURS], 3) for name in _peers({size: of})}
        limit_s = case.flops(size) * of[MATMUL] / matmul_flops()
        ratios[f"ours / limit at {size}"] = round(of[OURS] / limit_s, 3)
        numbers |= {f"{name}, seconds at {size}": value for name, value in of.items()}
        numbers |= {f"{name}, bytes at {size}": value for name, value in found[size].peak_bytes.items()}
        work = case.flops(size), case.moved_bytes(size), of[OURS]
        notes.append(Roofline.of(found[size].times).line(f"{size:,}", *work))
    panels = [Panel("time", "sequence length", "seconds", _by_name(seconds))]
    peaks = {size: {name: value / MEBIBYTE for name, value in one.peak_bytes.items()} for size, one in found.items()}
    if case.memory:
        panels.append(Panel("peak of tensors", "sequence length", "MiB above the inputs", _by_name(peaks)))
    table = _table(case, rounds, found, seconds, ratios)
    return Measured(
        case.name, case.question, setting, (table,), ratios, numbers, tuple(panels), tuple(notes), case.absent()
    )


def _table(
    case: Case,
    rounds: int,
    found: Mapping[int, SizeMeasured],
    seconds: Mapping[int, Mapping[str, float]],
    ratios: Mapping[str, float],
) -> Table:
    peers = _peers(seconds)
    forms = (OURS, *peers)
    columns = ("size", *forms, *(f"{peer} / ours" for peer in peers), "ours / limit", "spread")
    rows = []
    for size, one in found.items():
        times = (f"{1e3 * seconds[size][name]:,.2f} ms" if name in seconds[size] else "–" for name in forms)
        below = (ratios.get(f"{name} at {size}") for name in (*(f"{peer} / ours" for peer in peers), "ours / limit"))
        spread = max(of.spread for of in one.times.values())
        peaks = (f"{one.peak_bytes[n] / MEBIBYTE:,.1f} MiB" if n in one.peak_bytes else "–" for n in forms)
        cells = (f"{size:,}", *times, *("–" if ratio is None else f"{ratio:.2f}" for ratio in below), f"{spread:.0%}")
        rows.append((*cells, *(peaks if case.memory else ())))
    least = min((len(one.times[OURS].seconds) for one in found.values()), default=rounds)
    title = f"{_STATISTICS[case.statistic]} of {rounds if least == rounds else f'{least} to {rounds}'} rounds"
    return Table(title, (*columns, *(f"{name}, peak" for name in forms if case.memory)), tuple(rows))


def _peers(values: Mapping[int, Mapping[str, float]]) -> list[str]:
    """What is measured beside ours, the machine's rates apart."""
    return list(dict.fromkeys(name for of in values.values() for name in of if name not in (OURS, *RATES)))


def _by_name(values: Mapping[int, Mapping[str, float]]) -> dict[str, dict[float, float]]:
    """Values by size for each form that has any."""
    return {
        name: {float(size): of[name] for size, of in values.items() if name in of} for name in (OURS, *_peers(values))
    }


def read_finding(filed: Mapping[str, Any]) -> Measured:
    """The finding of a filed case or study of this folder."""
    return msgspec.convert(filed, Measured, strict=False, str_keys=True)


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
