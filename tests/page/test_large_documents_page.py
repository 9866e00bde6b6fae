"""The page with real ranks, one of which is killed; and what it holds after a million tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import psutil
import pytest

from tests.support import fake_rows
from tests.support.browser import opened_page
from tests.support.fake_engine import FakeEngine
from tests.support.served import served
from tests.support.service_server import model_folder, running_service
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


BOOK = Path(__file__).parents[2] / "data/books/moby_dick.txt"
LONG_MS = 600_000
WIDTH = 256  # of the model that ships
MB = 1 << 20


def begin(page: "Page", file: Path) -> None:
    """Choose a file and start."""
    page.set_input_files("#file", file)
    page.wait_for_selector("#plan-figures:not([aria-busy])")
    page.click("#start")


def finish(page: "Page") -> dict[str, str]:
    """Wait until all is there; gives the figures by name."""
    ended = "#bar[data-phase=done], #bar[data-phase=failed]"
    page.wait_for_selector(ended, state="attached", timeout=LONG_MS)
    assert page.get_attribute("#bar", "data-phase") == "done", page.inner_text("#document-notice")
    names = page.locator("#run-figures dt").all_inner_texts()
    values = page.locator("#run-figures dd").all_inner_texts()
    return {name: value.split("\n")[0] for name, value in zip(names, values, strict=True)}


def test_a_book_over_four_ranks_one_of_them_killed(browser: "Browser", tmp_path: Path) -> None:
    """The page says that the ranks are away, and goes on by itself to the end of the book."""
    if not BOOK.is_file():
        pytest.skip(f"{BOOK} is not there")
    book = tmp_path / "book.txt"
    book.write_bytes(BOOK.read_bytes()[:250_000])
    with served(tmp_path, ranks=4) as whole, opened_page(browser, whole.url) as page:
        begin(page, book)
        page.wait_for_selector("#bar[data-phase=reading]", state="attached")
        page.wait_for_selector(".rank:nth-child(4)", state="attached")
        eventually(lambda: int(page.get_attribute("#bar", "aria-valuenow") or 0) >= 5, "some of the book", 120)
        assert page.locator("#bar[data-phase=reading]").count()
        whole.parts()["rank 3"].kill()
        page.wait_for_selector("#page-notice:has-text('not ready')")
        finish(page)
        assert httpx.get(f"{whole.url}/v1/status").json()["lost_groups"] == 1


def renderers() -> int:
    """Bytes that the browser's renderers have to themselves."""
    family = psutil.Process().children(recursive=True)
    return sum(p.memory_full_info().uss for p in family if "--type=renderer" in p.cmdline())


def test_a_million_tokens_are_held_in_bounded_memory(
    browser: "Browser", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 rows of 256 numbers take the page less than 96 MB, the drawings included, and none of them is thinned."""
    monkeypatch.setattr(fake_rows, "HIDDEN", WIDTH)
    model = model_folder(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": WIDTH}))
    file = tmp_path / "million.txt"
    file.write_bytes((b"A million tokens of bytes, and every one of them read. " * 20_000)[: 1 << 20])
    engine = FakeEngine(keep=False, credit=1 << 16, hidden_size=WIDTH)
    with running_service(tmp_path, engine, model=model) as service, opened_page(browser, service.url) as page:
        page.set_input_files("#file", file)
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        page.click("#windows label[title='128 tokens']")
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        before = renderers()
        page.click("#start")
        figures = finish(page)
        page.wait_for_selector("#map canvas[width]:not([width='1'])")
        page.wait_for_timeout(2000)
        grown = renderers() - before
        page.click("#run > details summary")
        with page.expect_download() as saved:
            page.click("#save-rows")
        rows = np.load(saved.value.path())
        assert figures["Passages"] == "8,192" and rows.shape == (8192, WIDTH)
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        print(f"the page's heap has {heap / MB:.1f} MB; its renderers have grown by {grown / MB:.1f} MB")
        assert grown < 96 * MB
