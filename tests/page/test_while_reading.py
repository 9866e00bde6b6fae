"""What the page shows of a document while it is read: headings, the plane, results of a part."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_attn.wire.messages import Tokens
from tests.support.browser import opened_page
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import running_service
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODULES = "/page/vectors"
STORIES = """
ADVENTURE I. A SCANDAL IN BOHEMIA

I.

To her.

III.

I slept.

ADVENTURE II. THE RED-HEADED LEAGUE

I had called.
"""
NUMERALS = "\nPREFACE\n\nOf this.\n\nI\n\nOne day.\n\nII\n\nAnother.\n"
SECTIONS = "\nBOOK ONE\n\nI\n\nOne day.\n\nChapter 2\n\nII\n\nAnother.\n"


@dataclass
class HaltingEngine(FakeEngine):
    """Reads a document up to its second piece, then waits."""

    pieces: int = 0

    def handle(self, message: Any) -> Any:
        """The answers to one message."""
        self.pieces += isinstance(message, Tokens)
        self.paused = self.paused or self.pieces == 2
        return super().handle(message)


PLACES = (
    (STORIES, "To her", ["", "ADVENTURE I. A SCANDAL IN BOHEMIA, I."]),
    (STORIES, "I slept", ["", "ADVENTURE I. A SCANDAL IN BOHEMIA, III."]),
    (STORIES, "I had called", ["", "ADVENTURE II. THE RED-HEADED LEAGUE"]),
    (NUMERALS, "Another", ["", "II"]),
    (SECTIONS, "One day", ["BOOK ONE", "I"]),
    (SECTIONS, "Another", ["BOOK ONE", "Chapter 2, II"]),
)


def test_a_bare_numeral_is_a_section_of_its_story(browser: "Browser", tmp_path: Path) -> None:
    """A passage is headed by the story that it stands in; where nothing else is there, numerals are the chapters."""
    program = """async ([module, text, at]) => {
        const headings = new (await import(module)).Headings();
        headings.push(new TextEncoder().encode(text));
        const { part, chapter } = headings.under(at);
        return [part, chapter];
    }"""
    with running_service(tmp_path) as service, opened_page(browser, service.url) as page:
        for text, words, place in PLACES:
            found = page.evaluate(program, [f"{MODULES}/headings.js", text, text.index(words)])
            assert found == place, words


def test_points_part_when_more_rows_come(browser: "Browser", tmp_path: Path) -> None:
    """Of one row there is no plane to begin with; of those that follow there is, without a reload."""
    program = """async ([geometry, rows]) => {
        const [{ principalPlane }, { Rows }] = [await import(geometry), await import(rows)];
        const kept = new Rows();
        const at = (row) => ({ index: row, start: row, stop: row + 1, byte_start: row, byte_stop: row + 1 });
        const push = (row) => kept.push({ ...at(row), embedding: [row, (row * row) % 5, 1] });
        push(0);
        const { components } = principalPlane(kept, 100, []);
        for (let row = 1; row < 9; row += 1) push(row);
        return new Set(principalPlane(kept, 100, components).places).size;
    }"""
    with running_service(tmp_path) as service, opened_page(browser, service.url) as page:
        assert page.evaluate(program, [f"{MODULES}/geometry.js", f"{MODULES}/rows.js"]) > 9


def test_what_was_asked_of_a_part_is_asked_again(browser: "Browser", tmp_path: Path) -> None:
    """Results say of how many passages they are, and are those of all once all are read."""
    engine = HaltingEngine(keep=False, credit=4_000)
    text = "".join(f"Paragraph {i} tells of {i * 7919 % 1000} ships.\n" for i in range(400)).encode()
    with running_service(tmp_path, engine) as service, opened_page(browser, service.url) as page:
        page.set_input_files("#file", files=[{"name": "sea.txt", "mimeType": "text/plain", "buffer": text}])
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        page.click("#start")

        found: list[str] = []

        def asked() -> bool:
            page.fill("#query", "ships")
            page.keyboard.press("Enter")
            page.wait_for_selector("#found:not(:has-text('Looking'))")
            found.append(page.inner_text("#found"))
            return "that were read by then" in found[-1]

        eventually(asked, "results of a part")
        service.engine_port.resume()
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        page.wait_for_selector("#found:not(:has-text('by then')):has(.hit)")
        passages = page.locator("#run-figures > div:has(dt:text-is('Passages')) dd").inner_text()
        assert f"of {passages} passages" in page.inner_text(".hit >> nth=0")
