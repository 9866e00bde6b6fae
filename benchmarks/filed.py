"""What was filed: results by name and their ratios, and the table of targets that a page has of them.

`python -m benchmarks.filed` writes the table into its page, from filed results alone.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.setting import ROOT, Setting
from benchmarks.targets import TARGETS, Target, Verdict, benchmark_of

__all__ = ["PAGE", "RESULTS", "filed_results", "filled_in", "latest", "ratios_of", "target_table", "write_page"]

RESULTS = Path("benchmarks/results")
PAGE = Path("docs/measurements/performance.md")
BEGIN, END = "<!-- targets: begin -->\n", "<!-- targets: end -->\n"
# What no case of `dist-attn bench` measures.
WITHOUT_COMMAND = {"gpu": "`make gpu`"}


def filed_results(folder: Path) -> list[dict[str, Any]]:
    """Every filed result that has ratios, each with the name of its `file`; files that are no results are left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(values, dict) and ratios_of(values) and "setting" in values:
            found.append({**values, "file": path.name})
    return found


def ratios_of(filed: Mapping[str, Any]) -> dict[str, float]:
    """By name; none of what has no targets."""
    return dict(filed.get("ratios") or {})


def latest(filed: Sequence[Mapping[str, Any]], case: str, setting: Setting | None = None) -> Mapping[str, Any] | None:
    """The newest result of a case; with a `setting` only of the same machine and number of threads."""
    fitting = [one for one in filed if one["case"] == case]
    if setting is not None:
        here = (setting.machine, setting.threads)
        fitting = [one for one in fitting if (one["setting"]["machine"], one["setting"]["threads"]) == here]
    return max(fitting, key=lambda one: str(one["setting"]["date"]), default=None)


def target_table(filed: Sequence[Mapping[str, Any]]) -> str:
    """Every target with what the newest filed result reached, where and when; rows for each device that has results."""
    head = ("| what | target | measured | met | filed | command |", "|---|---|---|---|---|---|")
    named = sorted({one["case"] for one in filed})
    rows = (
        _row(target, latest(filed, case))
        for target in TARGETS
        for case in [case for case in named if benchmark_of(case) == target.benchmark] or [target.benchmark]
    )
    return "\n".join([*head, *rows]) + "\n"


def _row(target: Target, source: Mapping[str, Any] | None) -> str:
    reached = None if source is None else ratios_of(source).get(target.ratio)
    said, met = Verdict(target, reached).said
    where = ""
    if source is not None and reached is not None:
        setting = source["setting"]
        device = source["case"].partition(" on ")[2] or f"threads: {setting['threads']}"
        where = f"[{setting['date'][:10]}](../../benchmarks/results/{source['file']}), {device}"
    command = WITHOUT_COMMAND.get(target.benchmark, f"`dist-attn bench {target.benchmark}`")
    cells = (target.words, target.needed, said if reached is not None else "not measured yet", met, where, command)
    return f"| {' | '.join(cells)} |"


def filled_in(page: str, table: str) -> str:
    """The page with this table between its two marks.

    Raises: ValueError where the marks are not there.
    """
    before, found, rest = page.partition(BEGIN)
    _, also, after = rest.partition(END)
    if not (found and also):
        raise ValueError(f"{PAGE} has no place for the table, between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table}{END}{after}"


def write_page(root: Path) -> None:
    """Bring the page up to what is filed; where there is no page, nothing happens."""
    page = root / PAGE
    if page.is_file():
        text = page.read_text()
        new = filled_in(text, target_table(filed_results(root / RESULTS)))
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    write_page(ROOT)
