"""A million drawn tokens on the web page: whether what the tab holds has a bound, and whether it stays alive.

`dist-attn bench page-tokens --tokens 1000000` presses "Continue" in a headless Chromium until so many tokens have
come from an engine that draws at once, each in an event of its own.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx

from benchmarks.setting import Setting, look_around
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from dist_attn_papers.page.watched_tab import Held, TabReport, WatchedTab, watched_tab
from dist_attn_papers.service.instant_engine import InstantEngine
from dist_attn_papers.service.instant_sessions import InstantSessions
from dist_attn_papers.service.program import instant_service, parser_of, sizes_of
from tests.support.chromium import chromium, why_no_chromium

__all__ = ["Drawn", "main", "measure"]

TEXT = "It was the best of times, it was the worst of times; grün were the hills, said he to her. "
BEGINNING = "It was a cold morning in March"
LAST = 300  # tokens that are looked for at the end
AT_ONCE = 65_536  # the most that a service draws in one request, unless it is told otherwise
PATIENCE_S = 3600.0
MOST_LAG_MS, MOST_HEAP, MOST_CHARACTERS = 100.0, 8_000_000, 40_000


@dataclass(frozen=True)
class Drawn:
    """All of it. `held` is what the tab held after each press; `characters` those that are on the page in the end.

    `ends_right` says whether the page ends with what was drawn last.
    """

    setting: Setting
    tokens: int
    characters: int
    ends_right: bool
    position: int
    held: tuple[Held, ...]
    report: TabReport
    case: str = "page-tokens"

    def as_json(self) -> str:
        """The result for machines."""
        return json.dumps({"object": "benchmark", **asdict(self)}, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        heaps = " ".join(f"{one.heap / 1e6:.2f}" for one in self.held)
        return "\n".join(
            [
                f"# {self.case}",
                "",
                f"{self.tokens:,} tokens drawn on the page; {self.characters:,} characters are on it in the end, "
                f"{'the last ones' if self.ends_right else 'NOT THE LAST ONES'}.",
                f"Wanted: lag p99 below {MOST_LAG_MS:g} ms, heap grown by less than {MOST_HEAP / 1e6:g} MB, at most "
                f"{MOST_CHARACTERS:,} characters.",
                "",
                self.setting.sentence(),
                "",
                TabReport.heading(),
                self.report.as_row(),
                "",
                f"Heap in MB after each press of the button: {heaps}.",
                "",
            ]
        )

    @property
    def is_fine(self) -> bool:
        """Whether the tab stayed alive and within its bounds."""
        grown = self.report.after.heap - self.report.before.heap
        bounded = grown < MOST_HEAP and self.characters <= MOST_CHARACTERS
        return bounded and self.ends_right and self.report.lag_p99_ms < MOST_LAG_MS


def _press(tab: WatchedTab, tokens: int) -> tuple[TabReport, list[Held]]:
    """Let the model go on until so many tokens are drawn."""
    page, held = tab.page, [tab.held()]
    page.click("#tab-continue")
    page.fill("#prompt", BEGINNING)
    page.evaluate("document.getElementById('max-tokens').removeAttribute('max')")
    presses = [min(AT_ONCE, tokens - at) for at in range(0, tokens, AT_ONCE)]

    def begin() -> None:
        page.fill("#max-tokens", str(presses.pop(0)))
        page.click("#write")

    def ended() -> bool:
        if not page.is_enabled("#write"):
            return False
        if page.is_visible("#write-notice"):
            raise RuntimeError(page.inner_text("#write-notice"))
        held.append(tab.held())
        if presses:
            begin()
            return False
        return True

    return tab.during(begin, ended, lambda: page.inner_text("#gauge-words")), held


def measure(tokens: int, model: str = "books-6m") -> Drawn:
    """Draw so many tokens in one session of the page.

    Raises: RuntimeError with the page's words if it does not come to its end.
    """
    setting, folder = look_around(), resolve_model_folder(model)
    tokeniser = load_tokeniser(folder)
    text = [int(token) for token in tokeniser.encode(TEXT.encode())]
    sizes = sizes_of(folder)
    engine = InstantEngine(*sizes, sessions=InstantSessions(*sizes, text))
    with instant_service(folder, engine) as service:
        with chromium() as browser, watched_tab(browser, service.url, PATIENCE_S) as tab:
            report, held = _press(tab, tokens)
            shown = str(tab.page.evaluate("document.getElementById('paper').textContent"))
        sessions = httpx.get(f"{service.url}/v1/sessions").json()["data"]
    last = tokeniser.decode([text[i % len(text)] for i in range(max(0, tokens - LAST), tokens)])
    ends_right = shown.endswith(last.decode(errors="ignore"))
    return Drawn(setting, tokens, len(shown), ends_right, sessions[0]["position"], tuple(held), report)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when the tab was as wanted, 1 when not, 2 when something is missing."""
    parser = parser_of("page-tokens", __doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    given = parser.parse_args(arguments)
    if lack := why_no_chromium():
        print(f"page_tokens: {lack}", file=sys.stderr)
        return 2
    found = measure(given.tokens, given.model)
    print(found.as_markdown())
    given.json.write_text(found.as_json())
    return int(not found.is_fine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
