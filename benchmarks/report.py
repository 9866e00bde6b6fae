"""Cases, measured: the works of every size in turns, as one finding; and findings, filed as JSON."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases import ALONE, OURS, Case
from benchmarks.filed import RESULTS, write_page
from benchmarks.measured import Finding, Found, Measured, Panel, Table
from benchmarks.setting import ROOT, Setting, look_around
from benchmarks.timing import MATMUL, RATES, Roofline, Times, interleaved, matmul_flops

__all__ = ["file_finding", "finding_of", "measure", "read_finding"]

GRADIENTS = "backward / forward"
_STATISTICS = {"median": "Medians", "fastest": "The fastest"}


def measure(case: Case, sizes: Sequence[int], rounds: int) -> Measured:
    """Run the case at these sizes."""
    setting = look_around()
    found = {size: interleaved(case.works(size), rounds, budget_s=case.budget_s) for size in sizes}
    return finding_of(case, setting, rounds, found)


def finding_of(case: Case, setting: Setting, rounds: int, times: Mapping[int, Mapping[str, Times]]) -> Measured:
    """Peers over ours, ours over the arithmetic limit, and how far ours stays from what the machine can do."""
    peers = list(dict.fromkeys(name for of in times.values() for name in of if name not in (OURS, ALONE, *RATES)))
    compared = [*(f"{peer} / ours" for peer in peers), "ours / limit"]
    compared += [GRADIENTS] * any(ALONE in of for of in times.values())
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    curves: dict[str, dict[float, float]] = {name: {} for name in (OURS, *peers)}
    rows = []
    notes = ["Rounds are taken in turns; the limit is the operations of the form used at the rate of a matrix product."]
    for size, of_size in times.items():
        seconds = {name: float(getattr(one, case.statistic)) for name, one in of_size.items()}
        found = {f"{peer} / ours": seconds[peer] / seconds[OURS] for peer in peers if peer in seconds}
        found["ours / limit"] = seconds[OURS] / (case.flops(size) * seconds[MATMUL] / matmul_flops())
        if ALONE in seconds:
            found[GRADIENTS] = seconds[OURS] / seconds[ALONE] - 1
        ratios |= {f"{name} at {size}": round(value, 3) for name, value in found.items()}
        numbers |= {f"{name}, seconds at {size}": value for name, value in seconds.items()}
        for name in curves.keys() & seconds.keys():
            curves[name][float(size)] = seconds[name]
        work = case.flops(size), case.moved_bytes(size), seconds[OURS]
        notes.append(Roofline.of(of_size).line(f"{size:,}", *work))
        of_forms = (f"{1e3 * seconds[name]:,.2f} ms" if name in seconds else "–" for name in curves)
        of_ratios = (f"{found[name]:.2f}" if name in found else "–" for name in compared)
        spread = max(one.spread for one in of_size.values())
        rows.append((f"{size:,}", *of_forms, *of_ratios, f"{spread:.0%}"))
    least = min((len(of_size[OURS].seconds) for of_size in times.values()), default=rounds)
    title = f"{_STATISTICS[case.statistic]} of {rounds if least == rounds else f'{least} to {rounds}'} rounds"
    table = Table(title, ("size", *curves, *compared, "spread"), tuple(rows))
    panel = Panel("time", "sequence length", "seconds", curves)
    result = Found((table,), ratios, numbers, (panel,), tuple(notes), case.absent())
    return Measured(**vars(result), case=case.name, question=case.question, setting=setting)


def read_finding(filed: Mapping[str, Any]) -> Measured:
    """The finding of a filed case or study of this folder."""
    return msgspec.convert(filed, Measured, strict=False, str_keys=True)


def file_finding(finding: Finding, folder: Path | None = None) -> Path:
    """Write the finding's JSON into a folder, in place of the one before; its path.

    Without a `folder` it is that of results, and the page of targets is brought up to it.
    """
    into = ROOT / RESULTS if folder is None else folder
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{re.sub(r'[^A-Za-z0-9.]+', '-', finding.case)}.json"
    path.write_text(finding.as_json())
    if folder is None:
        write_page(ROOT)
    return path
