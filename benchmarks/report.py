"""Cases, measured: the works of every size in turns, as one finding; and findings, filed as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases import OURS, Case
from benchmarks.filed import RESULTS, write_page
from benchmarks.measured import Finding, Found, Measured, Panel, Table
from benchmarks.setting import ROOT, Setting, look_around
from benchmarks.timing import MATMUL, RATES, Roofline, Times, interleaved, matmul_flops

__all__ = ["file_finding", "finding_of", "measure", "read_finding", "refresh_page"]

_STATISTICS = {"median": "Medians", "fastest": "The fastest"}


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Measured:
    """Run the case at these sizes."""
    setting = look_around()
    found = {size: interleaved(case.works(size), rounds, budget_s=case.budget_s) for size in sizes}
    return finding_of(case, setting, rounds, found)


def finding_of(case: Case, setting: Setting, rounds: int, found: Mapping[int, Mapping[str, Times]]) -> Measured:
    """Peers over ours, ours over the arithmetic limit, and how far ours stays from what the machine can do."""
    seconds = {
        size: {name: float(getattr(one, case.statistic)) for name, one in times.items()}
        for size, times in found.items()
    }
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    notes = ["Rounds are taken in turns; the limit is the operations of the form used at the rate of a matrix product."]
    for size, of in seconds.items():
        ratios |= {f"{name} / ours at {size}": round(of[name] / of[OURS], 3) for name in _peers({size: of})}
        limit_s = case.flops(size) * of[MATMUL] / matmul_flops()
        ratios[f"ours / limit at {size}"] = round(of[OURS] / limit_s, 3)
        numbers |= {f"{name}, seconds at {size}": value for name, value in of.items()}
        work = case.flops(size), case.moved_bytes(size), of[OURS]
        notes.append(Roofline.of(found[size]).line(f"{size:,}", *work))
    curves = {
        name: {float(size): of[name] for size, of in seconds.items() if name in of} for name in (OURS, *_peers(seconds))
    }
    panel = Panel("time", "sequence length", "seconds", curves)
    table = _table(case, rounds, found, seconds, ratios)
    result = Found((table,), ratios, numbers, (panel,), tuple(notes), case.absent())
    return Measured(**vars(result), case=case.name, question=case.question, setting=setting)


def _table(
    case: Case,
    rounds: int,
    found: Mapping[int, Mapping[str, Times]],
    seconds: Mapping[int, Mapping[str, float]],
    ratios: Mapping[str, float],
) -> Table:
    forms = (OURS, *_peers(seconds))
    compared = (*(f"{peer} / ours" for peer in forms[1:]), "ours / limit")
    rows = []
    for size, times in found.items():
        of_forms = (f"{1e3 * seconds[size][name]:,.2f} ms" if name in times else "–" for name in forms)
        below = (ratios.get(f"{name} at {size}") for name in compared)
        spread = max(one.spread for one in times.values())
        of_ratios = ("–" if ratio is None else f"{ratio:.2f}" for ratio in below)
        rows.append((f"{size:,}", *of_forms, *of_ratios, f"{spread:.0%}"))
    least = min((len(times[OURS].seconds) for times in found.values()), default=rounds)
    title = f"{_STATISTICS[case.statistic]} of {rounds if least == rounds else f'{least} to {rounds}'} rounds"
    return Table(title, ("size", *forms, *compared, "spread"), tuple(rows))


def _peers(values: Mapping[int, Mapping[str, float]]) -> list[str]:
    """What is measured beside ours, the machine's rates apart."""
    return list(dict.fromkeys(name for of in values.values() for name in of if name not in (OURS, *RATES)))


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
