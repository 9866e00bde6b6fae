"""Pictures of the web page while and after it encodes a book, as docs/images has them.

`dist-attn bench page-screenshots BOOK --ranks 4` starts a service of its own, goes through the page in a headless
Chromium as a person would, and writes PNG files: light, dark and narrow. It prints what it has seen.
"""

import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from dist_attn_papers.retrieval.questions import QUESTIONS
from dist_attn_papers.service.program import START_S, own_service, parser_of
from tests.support.chromium import chromium, why_no_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

__all__ = ["main"]

LONGEST_MS = 900_000
WIDE: "ViewportSize" = {"width": 1440, "height": 900}
NARROW: "ViewportSize" = {"width": 390, "height": 844}
COLOURS = 256
QUESTIONS_ASKED, TILES_IN_ROW, TILE_WIDTH = 10, 5, 234

FLAGS = re.IGNORECASE | re.DOTALL

Questions = Sequence[tuple[str, str]]
"""Each with a pattern that passages with an answer match."""


@dataclass
class Camera:
    """Takes pictures of a page into a folder, in few colours so that they stay small."""

    page: "Page"
    folder: Path
    sizes: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, *, dark: bool = False, narrow: bool = False, whole: bool = False) -> None:
        """One picture, in light or dark colours."""
        self.page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="reduce")
        if narrow:
            self.page.set_viewport_size(NARROW)
        self.page.wait_for_timeout(400)
        self.save(Image.open(io.BytesIO(self.page.screenshot(full_page=whole))).convert("RGB"), name)
        if narrow:
            self.page.set_viewport_size(WIDE)

    def save(self, picture: Image.Image, name: str) -> None:
        """Write a picture under its name."""
        path = self.folder / f"page-{name}.png"
        picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=1).save(path, optimize=True)
        self.sizes[path.name] = path.stat().st_size


def _encode(camera: Camera, book: Path, size: int, query: str) -> dict[str, Any]:
    """From the empty page to an open passage; gives what the page said at the end."""
    page = camera.page
    camera.take("start")
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / book.name
        part.write_bytes(book.read_bytes()[:size])
        page.set_input_files("#file", part)
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        return _watch(camera, query)


def _watch(camera: Camera, query: str) -> dict[str, Any]:
    """From the estimate to an open passage."""
    page = camera.page
    camera.take("plan")
    began = time.monotonic()
    page.click("#start")
    page.wait_for_selector("#bar[data-phase=reading]", state="attached", timeout=LONGEST_MS)
    while int(page.get_attribute("#bar", "aria-valuenow") or 0) < 40:
        page.wait_for_timeout(100)
    page.wait_for_timeout(1000)
    camera.take("during")
    camera.take("during-dark", dark=True)
    camera.take("during-narrow", narrow=True, whole=True)
    page.wait_for_selector("#bar[data-phase=done]", state="attached", timeout=LONGEST_MS)
    seconds = time.monotonic() - began
    page.wait_for_timeout(1500)
    page.fill("#query", query)
    page.click("#search button")
    page.wait_for_selector(".hit")
    page.wait_for_timeout(500)
    camera.take("after")
    camera.take("after-dark", dark=True)
    page.click(".hit")
    page.wait_for_timeout(600)
    camera.take("passage")
    return {"figures": page.inner_text("#run-figures").split("\n"), "seconds": round(seconds, 1)}


def _continue(camera: Camera) -> dict[str, Any]:
    """The document into a session, and what the model makes of it."""
    page = camera.page
    page.evaluate("scrollTo(0, 0)")
    page.click("#to-session")
    page.wait_for_selector(".dot", timeout=LONGEST_MS)
    page.wait_for_selector("#write:enabled", timeout=LONGEST_MS)
    page.click("#write")
    page.wait_for_selector("#paper .drawn", timeout=LONGEST_MS)
    page.wait_for_selector("#write:enabled", timeout=LONGEST_MS)
    camera.take("continue")
    camera.take("continue-dark", dark=True)
    said = {"speed": page.inner_text("#paper-speed"), "gauge": page.inner_text("#gauge-words")}
    page.click("#tab-code")
    camera.take("code")
    page.click("#tab-document")
    return said


def _narrow(browser: "Browser", camera: Camera, url: str, query: str, asked: Questions) -> list[int | None]:
    """The same document in a second, narrow window, found by its ids as after a reload; gives what `_ask` does."""
    saved = camera.page.context.storage_state()
    context = browser.new_context(viewport=NARROW, storage_state=saved, device_scale_factor=1)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#bar[data-phase=done]", state="attached", timeout=LONGEST_MS)
    page.wait_for_timeout(2000)
    narrow = Camera(page, camera.folder, camera.sizes)
    places = _ask(narrow, asked) if asked else []
    page.fill("#query", query)
    page.click("#search button")
    page.wait_for_selector(".hit")
    page.wait_for_timeout(500)
    narrow.take("narrow")
    narrow.take("narrow-dark", dark=True, whole=True)
    context.close()
    return places


def _answered(book: Path, size: int) -> Questions:
    """The questions about this book that its first `size` bytes answer."""
    text = book.read_bytes()[:size].decode("utf-8", "ignore")
    return [(asked, answer) for asked, answer in QUESTIONS.get(book.stem, ()) if re.search(answer, text, FLAGS)]


def _ask(narrow: Camera, asked: Questions) -> list[int | None]:
    """The page's answers in one picture; gives the place of the first passage that has an answer, for each question."""
    places = list[int | None]()
    height = NARROW["height"] * TILE_WIDTH // NARROW["width"]
    tiles = Image.new("RGB", (TILE_WIDTH * TILES_IN_ROW, height * -(-len(asked) // TILES_IN_ROW)))
    for number, (question, pattern) in enumerate(asked):
        narrow.page.fill("#query", question)
        with narrow.page.expect_response("**/v1/search") as answer:
            narrow.page.click("#search button")
        texts = [result["text"] for result in answer.value.json()["results"]]
        right = (place for place, text in enumerate(texts, 1) if re.search(pattern, text, FLAGS))
        places.append(next(right, None))
        narrow.page.wait_for_timeout(400)
        tile = Image.open(io.BytesIO(narrow.page.screenshot())).convert("RGB").resize((TILE_WIDTH, height))
        row, column = divmod(number, TILES_IN_ROW)
        tiles.paste(tile, (column * TILE_WIDTH, row * height))
    narrow.save(tiles, "questions")
    return places


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 when something is missing."""
    parser = parser_of("page-screenshots", __doc__, model="writer-12m", ranks=4)
    parser.add_argument("book", type=Path)
    parser.add_argument("--bytes", type=int, default=300_000, help="of the book")
    parser.add_argument("--query", default="sharing a bed with a harpooneer")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args(arguments)
    lack = why_no_chromium() or (None if given.book.is_file() else f"{given.book} is no file")
    if lack:
        print(f"page_screenshots: {lack}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    with own_service(given.model, given.ranks, "--encoder=minilm-stream") as service, chromium() as browser:
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(START_S * 1000)
        page.goto(service.url)
        page.wait_for_selector("html[data-ready]", state="attached")
        camera = Camera(page, given.out)
        seen = _encode(camera, given.book, given.bytes, given.query)
        seen |= _continue(camera)
        asked = _answered(given.book, given.bytes)[:QUESTIONS_ASKED]
        seen["places_of_answers"] = _narrow(browser, camera, service.url, given.query, asked)
    result = json.dumps({**seen, "ranks": given.ranks, "bytes_of_pictures": camera.sizes}, indent=1)
    print(result)
    given.json.write_text(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
