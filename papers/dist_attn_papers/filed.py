"""What was measured last: `dist-attn bench filed [NAME …]` prints it, `--into FOLDER` writes pages and figures.

Filed is one JSON for each case, the newest; tables and figures are made from it here.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from benchmarks.filed import RESULTS
from benchmarks.measured import Finding, Table
from benchmarks.report import read_finding
from benchmarks.setting import ROOT, Setting
from dist_attn_papers.page.tokens import Drawn as PageTokens
from dist_attn_papers.page.upload import Sent
from dist_attn_papers.service import promises
from dist_attn_papers.studies.chapter_retrieval import ChapterRetrieval
from dist_attn_papers.studies.longest_softmax import LongestSoftmax
from dist_attn_papers.studies.perplexity_by_position import PerplexityByPosition
from dist_attn_papers.tables.experiment import Done, read_scores
from dist_attn_papers.tables.experiments import EXPERIMENTS
from dist_attn_papers.tables.finding import Report, TableFinding

__all__ = ["Drawn", "main", "read", "write", "write_page"]

# Findings with a shape of their own, by case.
SHAPES: Mapping[str, type[Finding]] = {
    "chapter-retrieval": ChapterRetrieval,
    "longest-softmax": LongestSoftmax,
    "page-tokens": PageTokens,
    "page-upload": Sent,
    "page-upload-million": Sent,
    "page-upload-ranks": Sent,
    "perplexity-by-position": PerplexityByPosition,
    **{f"service-{name}": promises.Measured for name in promises.MEASUREMENTS},
}


@runtime_checkable
class Drawn(Finding, Protocol):
    """A finding that has a figure too."""

    def draw(self, path: Path) -> None:
        """Write the figure, a PNG."""
        ...


def read(path: Path) -> Finding:
    """The finding of a filed JSON.

    Raises: OSError, ValueError (msgspec's errors are such) for a file that is none.
    """
    filed: dict[str, Any] = json.loads(path.read_bytes())
    case = str(filed.get("case"))
    if case.startswith("paper-"):
        return _paper(filed, case.removeprefix("paper-"))
    shape = SHAPES.get(case)
    return read_finding(filed) if shape is None else msgspec.convert(filed, shape, strict=False, str_keys=True)


def _paper(filed: Mapping[str, Any], name: str) -> TableFinding:
    """Tables and notes as they were filed; the panels are drawn again from the numbers of the jobs."""
    setting = msgspec.convert(filed["setting"], Setting)
    numbers = [{**number, "scores": read_scores(number["scores"])} for number in filed["numbers"]]
    panels = EXPERIMENTS[name.partition("-scale-")[0]].report(msgspec.convert(numbers, list[Done])).panels
    report = Report(msgspec.convert(filed["tables"], tuple[Table, ...]), tuple(filed["notes"]), panels)
    return TableFinding(name, filed["question"], filed["command"], setting, report, numbers)


def write(results: Path, folder: Path) -> None:
    """A page for each filed JSON, its figure beside it, and the page of the service's promises.

    Pages that are newer than their JSON are left as they are; pages of results that are not filed any more go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    filed = sorted(results.glob("*.json"))
    for left in folder.iterdir():
        if left.stem not in {path.stem for path in filed}:
            left.unlink()
    for path in filed:
        page = folder / f"{path.stem}.md"
        if not page.exists() or page.stat().st_mtime <= path.stat().st_mtime:
            write_page(read(path), page)
    (folder / "service-promises.md").write_text(promises.as_markdown(promises.filed_measurements(results)))


def write_page(finding: Finding, page: Path) -> None:
    """Write the page of a finding, and its figure beside it."""
    text = finding.as_markdown()
    if isinstance(finding, Drawn):
        finding.draw(page.with_suffix(".png"))
        text += f"\n![]({page.stem}.png)\n"
    page.write_text(text)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 printed or written, 2 for a name that nothing is filed under."""
    parser = argparse.ArgumentParser(prog="dist-attn bench filed", description="Print what was measured last.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, as their files are called; default: all")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write pages and figures of all there instead")
    given = parser.parse_args(arguments)
    results = ROOT / RESULTS
    if given.into is not None:
        write(results, given.into)
        return 0
    cases = sorted(path.stem for path in results.glob("*.json"))
    unknown = [name for name in given.names if name not in cases]
    if unknown:
        print(f"filed: nothing is filed under {unknown[0]!r}; there are {', '.join(cases)}", file=sys.stderr)
        return 2
    for name in given.names or cases:
        print(read(results / f"{name}.json").as_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
