"""`python -m benchmarks.performance_page`: the table of targets in its page, from filed results alone."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.filed import RESULTS, filed_results, latest, ratios_of
from benchmarks.targets import TARGETS, Target, Verdict
from benchmarks.verify import ROOT

__all__ = ["PAGE", "filled_in", "target_table", "write"]

PAGE = Path("docs/measurements/performance.md")
BEGIN, END = "<!-- targets: begin -->\n", "<!-- targets: end -->\n"
# What no case of `dist-attn bench` measures.
WITHOUT_COMMAND = {"h200": "needs a GPU: `make gpu`"}


def target_table(filed: Sequence[Mapping[str, Any]]) -> str:
    """Every target with what the newest filed result reached, where and when."""
    lines = ["| what | target | measured | met | filed | command |", "|---|---|---|---|---|---|"]
    lines += [_row(target, filed) for target in TARGETS]
    return "\n".join(lines) + "\n"


def _row(target: Target, filed: Sequence[Mapping[str, Any]]) -> str:
    source = latest(filed, target.benchmark)
    reached = None if source is None else ratios_of(source).get(target.ratio)
    said, met = Verdict(target, reached).said
    where = ""
    if source is not None and reached is not None:
        setting = source["setting"]
        where = f"[{setting['date'][:10]}](../../benchmarks/results/{source['file']}), threads: {setting['threads']}"
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


def write(root: Path, results: Path) -> None:
    """Bring the page up to what is filed; where there is no page, nothing happens."""
    page = root / PAGE
    if page.is_file():
        text = page.read_text()
        new = filled_in(text, target_table(filed_results(root / results)))
        if new != text:
            page.write_text(new)


if __name__ == "__main__":
    write(ROOT, RESULTS)
    sys.exit(0)
