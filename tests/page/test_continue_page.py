"""Sessions on the page: text goes on, states are forked, saved and opened again, and a reload loses none of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.test_two_models import two_models
from tests.support.browser import opened_page
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BEGINNING = "It was a cold morning in March"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service whose model says how many layers it has."""
    folder = tmp_path_factory.mktemp("service")
    model = model_folder(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    with running_service(folder, FakeEngine(keep=False), model=model) as running:
        yield running


def write(page: "Page", text: str, tokens: int) -> None:
    """Let the model go on with a text, to the end."""
    page.click("#tab-continue")
    page.fill("#prompt", text)
    page.fill("#max-tokens", str(tokens))
    page.click("#write")
    page.wait_for_selector(f"#paper-speed:has-text('{tokens} word pieces,')")
    page.wait_for_selector("#write:enabled")


def position(service: RunningService, name: str) -> int:
    """Where the session of this name stands, as the service says."""
    sessions = httpx.get(f"{service.url}/v1/sessions").json()["data"]
    found: int = next(session["position"] for session in sessions if session["name"] == name)
    return found


def test_text_goes_on_and_the_gauge_compares(browser: "Browser", service: RunningService) -> None:
    """What is written is read, drawn tokens appear behind it, and keys and values are counted for every token."""
    with opened_page(browser, service.url) as page:
        write(page, BEGINNING, 40)
        assert page.inner_text("#paper .read") == BEGINNING and page.inner_text("#paper .drawn")
        tokens = len(BEGINNING) + 40
        assert position(service, BEGINNING) == tokens
        assert "kB" in page.inner_text(".gauge-bar:has-text('keeps every word') strong")
        cache = 2 * 4 * 3 * 8 * tokens  # two of float32, layers, width
        assert f"{cache / 1000:.0f} kB" in page.inner_text("#gauge-words")
        page.click("#tab-code")
        assert '"max_tokens":40' in page.inner_text("#recipes")


def test_a_session_is_forked_and_found_after_a_reload(browser: "Browser", service: RunningService) -> None:
    """A fork at a checkpoint leaves the session as it is; after a reload the open one is open again, and goes on."""
    name = "Of forks"
    with opened_page(browser, service.url) as page:
        write(page, name, 30)
        entry = page.locator(".session.current")
        entry.locator(".dot").first.click()
        entry.locator("button:text-is('Fork')").click()
        page.wait_for_selector(".session.current:has-text('Of forks, fork')")
        assert position(service, f"{name}, fork") == len(name) and position(service, name) == len(name) + 30
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        assert "Of forks, fork" in page.locator(".session.current").inner_text()
        write(page, "", 12)
        assert position(service, f"{name}, fork") == len(name) + 12 and position(service, name) == len(name) + 30
        stored = page.evaluate("JSON.stringify({...localStorage})")
        assert "sess_" in stored and name not in stored


def test_a_state_is_saved_and_opened_again(browser: "Browser", service: RunningService, tmp_path: Path) -> None:
    """The file that is saved makes another session that stands where the first one stood; another file is refused."""
    with opened_page(browser, service.url) as page:
        write(page, "Kept for later", 8)
        with page.expect_download() as saved:
            page.locator(".session.current button:text-is('Save state')").click()
        file = tmp_path / "kept.state"
        saved.value.save_as(file)
        page.wait_for_selector("#write:enabled")
        page.set_input_files("#state-file", file)
        page.wait_for_selector(".session.current:has-text('kept')")
        eventually(lambda: position(service, "kept") == position(service, "Kept for later"), "the state", 60.0)
        page.wait_for_selector("#write:enabled")
        file.write_bytes(b"no state at all")
        page.set_input_files("#state-file", file)
        page.wait_for_selector("#write-notice.error")
        page.locator(".session.current button:text-is('End')").click()
        page.wait_for_selector("#paper-title:has-text('New session')")
        names = [session["name"] for session in httpx.get(f"{service.url}/v1/sessions").json()["data"]]
        assert names.count("kept") == 0


def read(page: "Page", text: bytes, name: str) -> None:
    """Let a document be read."""
    page.set_input_files("#file", files=[{"name": name, "mimeType": "text/plain", "buffer": text}])
    page.wait_for_selector("#plan-figures:not([aria-busy])")
    page.click("#start")
    page.wait_for_selector("#bar[data-phase=done]", state="attached")


def test_a_document_is_continued_and_continued_again(browser: "Browser", service: RunningService) -> None:
    """The stored text goes into a session once, without being sent again; the model goes on as often as asked."""
    text = ("A line of the document, and another one.\n" * 6000).encode()
    with opened_page(browser, service.url) as page:
        appends: list[str | None] = []
        page.on("request", lambda one: appends.append(one.post_data) if one.url.endswith("/append") else None)
        read(page, text, "lines.txt")
        for turn in range(3):
            page.click("#to-session")
            page.wait_for_selector(".session.current:has-text('lines.txt') .dot")
            page.wait_for_selector("#write:enabled")
            assert "another one." in page.inner_text("#paper")
            assert position(service, "lines.txt") == len(text) + 5 * turn
            write(page, "", 5)
            assert position(service, "lines.txt") == len(text) + 5 * (turn + 1)
            page.click("#tab-document")
            if turn == 1:
                page.reload()
                page.wait_for_selector("#bar[data-phase=done]", state="attached")
        assert len(appends) == 2 and all('"file_id"' in (sent or "") for sent in appends)  # one after the reload
        names = [session["name"] for session in httpx.get(f"{service.url}/v1/sessions").json()["data"]]
        assert names.count("lines.txt") == 1


def test_an_encoder_reads_what_the_writer_goes_on_with(browser: "Browser", tmp_path: Path) -> None:
    """With two models the job and the search are the encoder's and the session is the writer's; the page names both."""
    text = ("A line of the document, and another one.\n" * 300).encode()
    engines = {"engine": FakeEngine(keep=False), "encoder_engine": FakeEngine(keep=False)}
    models = two_models(tmp_path, max_tokens=512)
    with (
        running_service(tmp_path, **engines, **models) as service,
        opened_page(browser, service.url) as page,
    ):
        page.wait_for_selector("#service-state:has-text('tiny and vectors')")
        read(page, text, "lines.txt")
        (job,) = httpx.get(f"{service.url}/v1/jobs").json()["data"]
        assert (job["model"], job["progress"]["tokens"]) == ("vectors", len(text))
        page.fill("#query", "another line")
        page.keyboard.press("Enter")
        page.wait_for_selector(".hit .text:has-text('another')")
        page.click("#to-session")
        page.wait_for_selector(".session.current:has-text('lines.txt') .dot")
        page.wait_for_selector("#write:enabled")
        write(page, "", 5)
        assert position(service, "lines.txt") == len(text) + 5


def test_reading_to_continue_shows_how_far_it_is(browser: "Browser", service: RunningService) -> None:
    """From the first moment, beside the search and on the paper; whoever leaves it can begin it again."""
    text = ("A line of the document, and another one.\n" * 500).encode()
    with opened_page(browser, service.url) as page:
        page.route("**/append", lambda route: (setattr(service.engine, "paused", True), route.continue_()))
        read(page, text, "slow.txt")
        try:
            page.wait_for_selector("#carry:has-text('0 %')")
            page.click("#to-session")
            page.wait_for_selector("#paper-speed:has-text('Reading · 0 %')")
            assert "The model reads the text" in page.inner_text("#paper")
            assert page.inner_text("#paper-title") == "slow.txt"
            page.click("#write-stop")
            page.wait_for_selector("#write:enabled")
            assert page.locator("#carry").is_hidden() and page.inner_text("#paper-title") == "New session"
        finally:
            page.unroute("**/append")
            service.engine_port.resume()
        page.click("#tab-document")
        page.click("#to-session")
        page.wait_for_selector(".session.current:has-text('slow.txt') .dot")
        page.wait_for_selector("#write:enabled")
        assert position(service, "slow.txt") == len(text)
        page.click("#tab-document")
        page.click("#another")
        page.wait_for_selector("#pick")
        left = f"{service.url}/v1/sessions"
        eventually(
            lambda: "slow.txt" not in httpx.get(left).text, "a session that nobody wrote to to go with its document"
        )


def test_what_is_drawn_stays_in_sight(browser: "Browser", service: RunningService) -> None:
    """The paper follows the last token, also past its lower edge; somebody who went back to read is left there."""
    left = "(paper) => paper.scrollHeight - paper.scrollTop - paper.clientHeight"
    with opened_page(browser, service.url, viewport={"width": 1200, "height": 700}) as page:
        write(page, "A long beginning. " * 300, 200)
        paper = page.locator("#paper")
        box = paper.bounding_box()
        assert box is not None and box["y"] + box["height"] <= 700
        assert paper.evaluate("(paper) => paper.scrollTop") > 0 and paper.evaluate(left) < 2
        paper.evaluate("(paper) => { paper.scrollTop = 0; }")
        write(page, "", 60)
        assert paper.evaluate("(paper) => paper.scrollTop") == 0


def test_the_page_is_worked_by_keys_alone(browser: "Browser", service: RunningService) -> None:
    """Arrows turn the tabs, walk the map and say where they are; Enter opens a passage, Escape goes back."""
    with opened_page(browser, service.url) as page:
        page.focus("#tab-document")
        page.keyboard.press("ArrowRight")
        assert page.locator("#view-continue").is_visible() and page.locator("#view-document").is_hidden()
        page.keyboard.press("Home")
        text = ("Words by the hundred. " * 200).encode()
        page.set_input_files("#file", files=[{"name": "words.txt", "mimeType": "text/plain", "buffer": text}])
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        page.keyboard.press("Enter")  # the button to start has the focus
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        page.wait_for_selector("#map canvas[width='35']")
        page.focus("#map canvas")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#announcer").startswith("Passage 2 against Passage 2: 1.00")
        page.keyboard.press("Enter")
        page.wait_for_selector("#passage-title:has-text('Passage 2 of 35')")
        page.wait_for_selector("#passage:focus")
        page.keyboard.press("Escape")
        assert page.locator("#passage").is_hidden()
        assert page.evaluate("document.activeElement.matches('#map canvas')")
        unnamed = "button:not([aria-label]):empty, input:not([aria-label]):not([id]):not([name])"
        assert page.locator(unnamed).count() == 0


def test_colours_and_widths(browser: "Browser", service: RunningService) -> None:
    """The switch turns the colours and is remembered; nothing is wider than a narrow screen."""
    narrow = {"width": 360, "height": 740}
    with opened_page(browser, service.url, viewport=narrow, color_scheme="light", reduced_motion="reduce") as page:
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        page.reload()
        page.wait_for_selector("html[data-ready]", state="attached")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light != dark
        for view in ("document", "continue", "code"):
            page.click(f"#tab-{view}")
            assert page.evaluate("document.documentElement.scrollWidth") <= narrow["width"], view
