"""docs/measurements/performance.md says what was filed, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.filed import BEGIN, END, PAGE, RESULTS, filed_results, filled_in, target_table, write_page
from benchmarks.setting import ROOT
from benchmarks.targets import TARGETS


def _filed(date: str, ratios: dict[str, float]) -> dict[str, Any]:
    return {"case": "forward", "file": f"f-{date}.json", "setting": {"date": date, "threads": 2}, "ratios": ratios}


def test_the_page_is_what_is_filed() -> None:
    """The table in the repository is the one that the filed results give."""
    page = (ROOT / PAGE).read_text()
    assert filled_in(page, target_table(filed_results(ROOT / RESULTS))) == page


def test_rows_without_results_say_so() -> None:
    """Nothing filed: every row is not measured yet, and names its command; the newest result fills its rows."""
    rows = target_table([]).splitlines()[2:]
    assert len(rows) == len(TARGETS)
    assert all("| not measured yet |" in row for row in rows)
    filed = [_filed("2026-11-21", {"sdpa / ours at 512": 3.0}), _filed("2026-11-22", {"sdpa / ours at 512": 0.5})]
    table = target_table(filed)
    assert (
        "| forward against SDPA, 512 tokens | at least 1.00x | 0.50x | no "
        "| [2026-11-22](../../benchmarks/results/f-2026-11-22.json), threads: 2 | `dist-attn bench forward` |"
    ) in table
    assert table.count("not measured yet") == len(TARGETS) - 1


def test_only_the_table_is_replaced(tmp_path: Path) -> None:
    """What stands around the marks stays; without marks nothing is guessed, without a page nothing is written."""
    text = f"before\n{BEGIN}old\n{END}after\n"
    assert filled_in(text, "new\n") == f"before\n{BEGIN}new\n{END}after\n"
    with pytest.raises(ValueError, match="no place for the table"):
        filled_in("no marks", "new\n")
    write_page(tmp_path)
    assert list(tmp_path.iterdir()) == []
