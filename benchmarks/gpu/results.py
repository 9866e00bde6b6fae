"""What a file of the GPU check has of one machine, and where that goes: the record that `auto` goes by, and results."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Row
from benchmarks.gpu.speed import ratios_from, record_from_times
from benchmarks.measured import Measured, Table
from benchmarks.report import file_finding
from benchmarks.setting import Setting
from dist_attn.ops.gpu_record import GpuRecord, keep_record

__all__ = ["DID_NOT_END", "Results", "is_right", "keep", "record_from", "take_over"]

QUESTION = "How fast are the kernels on this GPU, against SDPA, flash-linear-attention and a copy?"
DID_NOT_END = "it did not end"
RIGHT_OR_WRONG, TIMED = ("kernels", "relative", "affine", "fla"), ("ratios", "peers", "fla-times")


class Results:
    """What a file has of one setting: a line for each start, and after it those of cases and of pieces.

    Of a case the newest line counts; `start` in it is the number of the start that wrote it.
    """

    def __init__(self, file: Path, setting: Mapping[str, Any]) -> None:
        self.file, self.setting = file, dict(setting)

    def read(self) -> tuple[dict[tuple[str, str], Row], int]:
        """The lines of this setting by piece and case, and the number of starts of any."""
        rows: dict[tuple[str, str], Row] = {}
        ours, starts = False, 0
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            row = json.loads(line)
            if "setting" in row:
                ours, starts = row["setting"] == self.setting, starts + 1
            elif ours:
                rows[row["piece"], row["case"]] = row | {"start": starts}
        return rows, starts

    def of(self, piece: str) -> dict[str, Row]:
        """Its cases."""
        return {case: row for (of, case), row in self.read()[0].items() if of == piece and case}

    def all_of(self, piece: str) -> list[str]:
        """The names of all of its cases, tried or not; none before its first process has listed them."""
        return list(self.read()[0].get((piece, ""), {}).get("cases", []))

    def ended(self, piece: str) -> bool:
        """Whether all of its cases were tried."""
        return bool(self.read()[0].get((piece, ""), {}).get("ended"))

    def is_right(self, piece: str) -> bool:
        """Whether nothing of it is left to be done."""
        return self.ended(piece) and all(map(is_right, self.of(piece).values()))

    def write(self, row: Row) -> None:
        """One line, in one go: several processes write."""
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(row).encode() + b"\n")
        finally:
            os.close(descriptor)


def is_right(row: Row) -> bool:
    """Whether a case ended, and nothing in it was wrong."""
    return "error" not in row and bool(row.get("right", True))


def take_over(file: Path) -> None:
    """Bring what a file has, of every setting with a GPU, into the record and the results of this tree.

    Raises: as `keep`.
    """
    for start in (row for row in map(json.loads, file.read_text().splitlines()) if "setting" in row):
        if start["setting"]["driver"] and not start["setting"]["tiny"]:
            keep(Results(file, start["setting"]), start["around"])


def keep(results: Results, around: Mapping[str, Any]) -> None:
    """Bring what is known so far into the record, and what has targets into the results, by the device's name.

    Raises: OSError where a file cannot be written; msgspec.ValidationError where what is there is no record.
    """
    device = results.setting["device"]
    keep_record(device, record_from(results))
    if ratios := ratios_from(_timed(results)):
        setting = Setting(**{**around, "machine": device})
        tables = tuple(_tables(results))
        file_finding(Measured(tables, ratios, {}, (), case=f"gpu on {device}", question=QUESTION, setting=setting))


def record_from(results: Results) -> GpuRecord:
    """Kernels of operations whose cases were all tried, captured steps likewise; tiles and times of what there is."""
    kernels = {case: row for piece in RIGHT_OR_WRONG for case, row in _tried(results, piece).items()}
    captured = _tried(results, "captured").values()
    tiles = [row for row in results.of("tiles").values() if "tiles" in row]
    return GpuRecord(
        **{name: results.setting[name] for name in ("driver", "torch", "triton", "commit")},
        kernels={case: _outcome(row) for case, row in kernels.items()},
        captured_steps=all(map(is_right, captured)) if captured else None,
        # The last of a key counts, which is the fastest.
        tiles={row["key"]: row["tiles"] for row in sorted(tiles, key=lambda row: -row["seconds"])},
        ratios=record_from_times(_timed(results)),
    )


def _tables(results: Results) -> Iterator[Table]:
    """What was seen, for people."""
    rows = {case: row for (_, case), row in results.read()[0].items() if case and is_right(row)}
    times = [(case, f"{1e3 * row['seconds']:.3g}") for case, row in rows.items() if "seconds" in row]
    yield Table("Milliseconds on the device", ("case", "ms"), tuple(times))
    rates = [
        (f"{case}{of.removesuffix('tokens/s').removesuffix('tokens_per_second')}", f"{rate:,.0f}")
        for case, row in rows.items()
        for of, rate in row.items()
        if of.endswith(("tokens/s", "tokens_per_second"))
    ]
    yield Table("Tokens a second", ("case", "tokens/s"), tuple(rates))
    profiles = [
        (case, *(f"{row[of]:,.4g}" for of in ("ms", "computing_ms", "launches")), row["longest"][0][2][:60])
        for case, row in rows.items()
        if "longest" in row
    ]
    columns = ("case", "ms", "of which the device computes", "launches", "longest kernel")
    yield Table("Where time goes", columns, tuple(profiles))
    judged = [(case, "right" if is_right(row) else _outcome(row)) for case, row in results.of("kernels").items()]
    yield Table("Kernels", ("case", "outcome"), tuple((case, str(said)) for case, said in judged))


def _tried(results: Results, piece: str) -> dict[str, Row]:
    """The cases of operations (their first words) of which none is left; one that was cut off is, unless all ended."""
    rows, ended = results.of(piece), results.ended(piece)
    done = {case for case, row in rows.items() if ended or row.get("error") != DID_NOT_END}
    left = {_operation(case) for case in {*results.all_of(piece), *rows} - done}
    return {case: row for case, row in rows.items() if _operation(case) not in left}


def _operation(case: str) -> str:
    return case.partition(" ")[0]


def _timed(results: Results) -> dict[str, Row]:
    return {case: row for piece in TIMED for case, row in results.of(piece).items()}


def _outcome(row: Row) -> float | str:
    """The worst error, or the words of what is wrong."""
    worst = max(row.get("errors", {"": 0.0}).values())
    return float(worst) if is_right(row) else row.get("error", f"errors of {worst:.2g}").splitlines()[0]
