"""A tab of Chromium that is watched: whether it stays alive, what it holds, and what its progress bar says."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page

__all__ = ["Held", "TabReport", "WatchedTab", "watched_tab"]

SAMPLE_MS, IDLE_MS = 250, 1500
# Notes long tasks, and by how many milliseconds a timer of 50 ms is late, as the answer to a click would be.
LAG = """() => {
  const seen = (globalThis.watchedTab = { tasks: [], lags: [] });
  const every = 50;
  const noted = (list) => list.getEntries().forEach((entry) => seen.tasks.push(entry.duration));
  const observer = new PerformanceObserver(noted);
  observer.observe({ type: "longtask" });
  const turn = (due) => {
    const now = performance.now();
    if (seen.lags.length < 100_000) seen.lags.push(Math.max(0, now - due));
    setTimeout(turn, every, now + every);
  };
  setTimeout(turn, every, performance.now() + every);
}"""


@dataclass(frozen=True)
class Held:
    """What a tab holds. Units: bytes.

    `heap` is that of its main thread's scripts, `own` all memory of its process that it shares with no other. In `own`
    are the bodies of answers too, which Playwright has the browser keep: about 200 bytes per drawn token.
    """

    heap: int
    own: int
    nodes: int


@dataclass(frozen=True)
class TabReport:
    """What was seen of a tab. Units: seconds, milliseconds, bytes.

    `lag_idle_p99_ms` is that of the page before it had anything to do: what else the machine is busy with. `steps` are
    the values that the progress bar had, `longest_wait_s` the longest time without a new one.
    """

    seconds: float
    long_tasks: int
    longest_task_ms: float
    lag_idle_p99_ms: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    before: Held
    after: Held
    most: Held
    steps: int
    longest_wait_s: float

    def as_row(self) -> str:
        """As a row of a table, below `heading`."""
        cells = [
            f"{self.seconds:.0f} s",
            f"{self.long_tasks}, {self.longest_task_ms:.0f} ms",
            f"{self.lag_idle_p99_ms:.0f} / {self.lag_p50_ms:.0f} / {self.lag_p99_ms:.0f} / {self.lag_max_ms:.0f} ms",
            *(
                f"{before / 1e6:.1f} / {after / 1e6:.1f} / {most / 1e6:.1f} MB"
                for before, after, most in (
                    (self.before.heap, self.after.heap, self.most.heap),
                    (self.before.own, self.after.own, self.most.own),
                )
            ),
            f"{self.after.nodes:,}",
            f"{self.steps}, {self.longest_wait_s:.1f} s",
        ]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def heading() -> str:
        """The head of a table of reports."""
        names = (
            "time",
            "long tasks, longest",
            "lag idle p99 / p50 / p99 / max",
            "heap before / after / most",
            "process before / after / most",
            "nodes after",
            "steps of progress, longest wait",
        )
        return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


@dataclass
class WatchedTab:
    """A page and the line to its browser; `held` may be asked at any time, `during` watches a piece of work."""

    page: "Page"
    tab: "CDPSession"
    whole: "CDPSession"
    most: list[Held] = field(default_factory=list)

    def held(self, *, tidy: bool = True) -> Held:
        """What it holds now; `tidy` collects what nobody refers to any more."""
        if tidy:
            self.tab.send("HeapProfiler.collectGarbage")
        heap = self.tab.send("Runtime.getHeapUsage")["usedSize"]
        nodes = self.tab.send("Memory.getDOMCounters")["nodes"]
        return Held(int(heap), self._own(), int(nodes))

    def _own(self) -> int:
        """Bytes that renderers share with nobody."""
        found = 0
        for process in self.whole.send("SystemInfo.getProcessInfo")["processInfo"]:
            if process["type"] != "renderer":
                continue
            with contextlib.suppress(OSError):  # it may end meanwhile
                lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
                found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
        return found

    def during(self, begin: Callable[[], None], ended: Callable[[], bool], progress: Callable[[], str]) -> TabReport:
        """Do `begin`, then look every quarter of a second until it has `ended`; `progress` is what a person sees."""
        before = self.held()
        self.page.evaluate(LAG)
        self.page.wait_for_timeout(IDLE_MS)
        idle = self.page.evaluate("globalThis.watchedTab.lags.splice(0)")
        began = changed = time.perf_counter()
        samples, seen, longest = [before], [progress()], 0.0
        begin()
        while not ended():
            self.page.wait_for_timeout(SAMPLE_MS)
            samples.append(self.held(tidy=False))
            if (now := progress()) != seen[-1]:
                longest = max(longest, time.perf_counter() - changed)
                changed = time.perf_counter()
                seen.append(now)
        seconds = time.perf_counter() - began
        noted = self.page.evaluate("globalThis.watchedTab")
        lags = _percentiles(noted["lags"])
        return TabReport(
            seconds=seconds,
            long_tasks=len(noted["tasks"]),
            longest_task_ms=max(noted["tasks"], default=0.0),
            lag_idle_p99_ms=_percentiles(idle)[98],
            lag_p50_ms=lags[49],
            lag_p99_ms=lags[98],
            lag_max_ms=max(noted["lags"], default=0.0),
            before=before,
            after=self.held(),
            most=Held(*(max(getattr(one, name) for one in samples) for name in ("heap", "own", "nodes"))),
            steps=len(seen),
            longest_wait_s=max(longest, time.perf_counter() - changed),
        )


def _percentiles(values: Sequence[float]) -> list[float]:
    return quantiles([*values, 0.0, 0.0], n=100, method="inclusive")  # of two values at least


@contextmanager
def watched_tab(browser: "Browser", url: str, patience_s: float) -> Iterator[WatchedTab]:
    """The page at an address, ready, in a profile of its own."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.set_default_timeout(1000 * patience_s)
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        yield WatchedTab(page, context.new_cdp_session(page), browser.new_browser_cdp_session())
    finally:
        context.close()
