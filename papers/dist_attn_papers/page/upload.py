"""A large file through the web page: whether the tab stays alive, shows how far it is, and holds what it should.

`dist-attn bench page-upload --megabytes 50` drives the page in a headless Chromium before a service of its own,
whose engine answers at once, so that rows come as fast as the service can pass them on; with `--ranks 2` the engine is
the real one.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.setting import Setting, look_around
from dist_attn.shipped import resolve_model_folder
from dist_attn_papers.page.watched_tab import TabReport, watched_tab
from dist_attn_papers.service.instant_engine import InstantEngine
from dist_attn_papers.service.program import instant_service, own_service, parser_of, sizes_of
from tests.support.chromium import chromium, why_no_chromium
from tests.support.whole_service import ServiceProcess

__all__ = ["Sent", "main", "measure"]

MEGABYTE = 1_000_000
LINE = "Line {} of a file that is large: it was the best of times, it was the worst of times, said he to her.\n"
PATIENCE_S = 7200.0
MOST_LAG_MS, MOST_HEAP, MOST_OWN = 100.0, 64_000_000, 256_000_000


@dataclass(frozen=True)
class Sent:
    """One file, from the click to the finished map. Units: bytes. `note` says what a reader is to know besides."""

    setting: Setting
    megabytes: int
    model: str
    ranks: int
    tokens: int
    rows: int
    report: TabReport
    case: str = "page-upload"
    note: str = ""

    def as_json(self) -> str:
        """The result for machines."""
        return json.dumps({"object": "benchmark", **asdict(self)}, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        engine = f"{self.ranks} ranks of {self.model}" if self.ranks else "an engine that answers at once"
        return "\n".join(
            [
                f"# {self.case}",
                "",
                f"{self.megabytes:,} MB through the page, before {engine}: {self.tokens:,} tokens, "
                f"{self.rows:,} passages.",
                *([self.note] if self.note else []),
                f"Wanted: lag p99 below {MOST_LAG_MS:g} ms, heap grown by less than {MOST_HEAP / 1e6:g} MB, the "
                f"process by less than {MOST_OWN / 1e6:g} MB.",
                "",
                self.setting.sentence(),
                "",
                TabReport.heading(),
                self.report.as_row(),
                "",
            ]
        )

    @property
    def is_fine(self) -> bool:
        """Whether the tab stayed alive and within its bounds."""
        seen = self.report
        grown = (seen.after.heap - seen.before.heap, seen.most.own - seen.before.own)
        return seen.lag_p99_ms < MOST_LAG_MS and grown[0] < MOST_HEAP and grown[1] < MOST_OWN


def _service(model: str, ranks: int) -> AbstractContextManager[ServiceProcess]:
    """One with so many ranks; with none its engine answers at once."""
    if ranks:
        return own_service(model, ranks)
    folder = resolve_model_folder(model)
    return instant_service(folder, InstantEngine(*sizes_of(folder), noise=True))


def measure(megabytes: float, model: str = "books-6m", ranks: int = 0) -> Sent:
    """Send a file of so many millions of bytes.

    Raises: RuntimeError with the page's words if it does not come to its end.
    """
    setting = look_around()
    with tempfile.TemporaryDirectory() as place, _service(model, ranks) as service:
        file = Path(place) / "large.txt"
        with file.open("w") as text:
            number = 0
            while text.tell() < megabytes * MEGABYTE:
                text.write("".join(LINE.format(number + i) for i in range(1000)))
                number += 1000
        with chromium() as browser, watched_tab(browser, service.url, PATIENCE_S) as tab:
            page = tab.page
            page.set_input_files("#file", file)
            page.wait_for_selector("#plan-figures:not([aria-busy])")
            over = page.locator("#bar[data-phase=done], #bar[data-phase=failed]")
            report = tab.during(
                lambda: page.click("#start"), lambda: over.count() > 0, lambda: page.inner_text("#run-phase")
            )
            if page.get_attribute("#bar", "data-phase") == "failed":
                raise RuntimeError(page.inner_text("#document-notice"))
            page.click("#run > details summary")
            lists = ":is(#run-figures, #run-details)"
            names = page.locator(f"{lists} dt").all_inner_texts()
            values = [text.split("\n")[0] for text in page.locator(f"{lists} dd").all_inner_texts()]
            figures = dict(zip(names, values, strict=True))
    tokens, rows = (int(figures[name].replace(",", "")) for name in ("Tokens", "Passages"))
    return Sent(setting, round(megabytes), Path(model).name, ranks, tokens, rows, report)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when the tab was as wanted, 1 when not, 2 when something is missing."""
    parser = parser_of("page-upload", __doc__, ranks=0)
    parser.add_argument("--megabytes", type=float, default=50, help="of the file; 10^6 bytes each")
    given = parser.parse_args(arguments)
    if lack := why_no_chromium():
        print(f"page_upload: {lack}", file=sys.stderr)
        return 2
    found = measure(given.megabytes, given.model, given.ranks)
    print(found.as_markdown())
    given.json.write_text(found.as_json())
    return int(not found.is_fine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
