"""A document on the page: from the file to the map, with keys, reloads and connections that break."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from dist_attn.commands.remote import KEY_VARIABLE
from dist_attn.settings import read_settings
from tests.service.test_keys import USER, digest
from tests.support.breaking_proxy import breaking_proxy
from tests.support.browser import opened_page
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually
from tests.text.test_documents import GOOD

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TEXT = "".join(
    f"Paragraph {i} tells of the sea, of grün and of {i * 7919 % 1000} ships.\n" for i in range(400)
).encode()
WINDOW = 128
ROWS = -(-len(TEXT) // WINDOW)  # a token is a byte here


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with an engine of the tests."""
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(keep=False)) as running:
        yield running


def choose(page: "Page", text: bytes = TEXT, name: str = "sea.txt") -> None:
    """Pick a file, wait for its estimate."""
    page.set_input_files("#file", files=[{"name": name, "mimeType": "text/plain", "buffer": text}])
    page.wait_for_selector("#plan-figures:not([aria-busy])")


def encoded(page: "Page") -> None:
    """Wait until the page says that all is there, and drawn."""
    page.wait_for_selector("#bar[data-phase=done]", state="attached")
    page.wait_for_selector(f"#map canvas[width='{ROWS}']")


def figure(page: "Page", name: str) -> str:
    """What stands under a heading of the figures."""
    found = page.locator(f":is(#run-figures, #run-details) > div:has(dt:text-is('{name}')) dd")
    text: str = found.evaluate("(value) => value.firstChild.textContent")
    return text


def on_diagonal(page: "Page") -> tuple[dict[str, float], str]:
    """A place on the map's diagonal and the beginning of the passage there."""
    box = page.locator("#map canvas").bounding_box()
    assert box is not None
    row = 6
    words = TEXT[row * WINDOW : row * WINDOW + 40].decode(errors="ignore").split("\n")[-1]
    middle = (row + 0.5) * box["width"] / ROWS
    return {"x": middle, "y": middle}, words.strip()


def ids(page: "Page") -> dict[str, Any]:
    """What the page keeps over a reload."""
    found: dict[str, Any] = json.loads(page.evaluate("localStorage.getItem('dist-attn ids') ?? '{}'"))
    return found


def test_the_whole_story(
    browser: "Browser",
    service: RunningService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the estimate to the saved vectors each step shows what the API gives, and its Python on the page runs."""
    with opened_page(browser, service.url) as page:
        choose(page)
        assert "23.4 k" in (page.locator("#plan-details dd").first.text_content() or "")
        page.click("#start")
        encoded(page)
        assert figure(page, "Tokens") == f"{len(TEXT):,}" and figure(page, "Passages") == str(ROWS)
        place, words = on_diagonal(page)
        page.hover("#map canvas", position=place)
        page.wait_for_selector(f".tip:has-text('{words}')")
        page.click("#map canvas", position=place)
        page.wait_for_selector(f"#passage-text:has-text('{words}')")
        title = page.inner_text("#passage-title")
        page.click("#passage-after")
        page.wait_for_selector(f"#passage-title:not(:has-text('{title}'))")
        page.fill("#query", "true ships")
        page.keyboard.press("Enter")
        page.wait_for_selector(".hit .text:has-text('Paragraph')")
        assert page.locator(".hit").count() == 8 and page.locator("#map .mark").count() == 8
        page.click("#run > details summary")
        with page.expect_download() as saved:
            page.click("#save-rows")
        data = Path(saved.value.path()).read_bytes()
        assert data.startswith(b"\x93NUMPY") and saved.value.suggested_filename == "sea.npy"
        page.click("#tab-code")
        code = page.inner_text("#recipes")
        assert f"{service.url}/v1/encodings?window={WINDOW}" in code and "@sea.txt" in code and "v1/search" in code
        page.click("#code-python")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sea.txt").write_bytes(TEXT)
        for block in page.locator("#recipes code").all_inner_texts():
            names: dict[str, Any] = {}
            exec(compile(block, "recipe", "exec"), names)
            names["client"].close()
        assert np.load("rows.npy").shape[0] == ROWS and "passage " in capsys.readouterr().out
        assert '"query": "true ships"' in page.inner_text("#recipes")


def test_words_that_a_passage_cuts_are_shown_whole(browser: "Browser", service: RunningService) -> None:
    """What is read of a document ends at words; where no space is near, at the characters that are whole."""
    words = " ".join(f"sun{i:04}grün" for i in range(100))
    read = """async ([text, begin, end]) => {
      const { DocumentText } = await import("/page/api/documents.js");
      return new DocumentText(null, "", new Blob([text])).read(begin, end);
    }"""
    with opened_page(browser, service.url) as page:
        for begin in range(0, 1300, 61):
            part = page.evaluate(read, [words, begin, begin + 128])
            known = set(words.split())
            assert known.issuperset(part.split()) and words.encode()[begin : begin + 128] in part.encode()
        assert page.evaluate(read, ["猫" * 100, 100, 200]) == "猫" * 32


def test_a_reload_in_the_middle_loses_nothing(browser: "Browser", tmp_path: Path) -> None:
    """The job goes on without the page; after a reload the page finds it, and reads passages from the service."""
    engine = FakeEngine(keep=False, paused=True)
    with running_service(tmp_path, engine) as running, opened_page(browser, running.url) as page:
        choose(page)
        page.click("#start")
        page.wait_for_selector("#run-phase:has-text('Reading')")
        page.reload()
        page.wait_for_selector("#run-title:has-text('sea.txt')")
        running.engine_port.resume()
        encoded(page)
        assert figure(page, "Passages") == str(ROWS)
        place, words = on_diagonal(page)
        page.click("#map canvas", position=place)
        page.wait_for_selector(f"#passage-text:has-text('{words}')")


def test_a_stream_of_rows_that_breaks_goes_on(browser: "Browser", service: RunningService) -> None:
    """Two times the connection breaks in the middle of the rows: each row is there once, in order, none is missing."""
    with breaking_proxy(service.port) as proxy, opened_page(browser, proxy.url) as page:
        proxy.cuts["from_row="] = [40_000, 40_000]
        asked: list[int] = []
        page.on("request", lambda request: asked.extend(map(int, re.findall(r"from_row=(\d+)", request.url))))
        choose(page, TEXT * 8)
        page.click("#start")
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        assert proxy.broken == ["from_row=", "from_row="]
        assert len(asked) == 3 and asked == sorted(asked) and asked[0] == 0 < asked[2]
        assert figure(page, "Passages") == f"{-(-8 * len(TEXT) // 256):,}"


def test_an_upload_that_breaks_goes_on(browser: "Browser", service: RunningService) -> None:
    """The connection breaks in the middle of a piece; what the service has in the end is the file."""
    text = TEXT * 30
    with breaking_proxy(service.port, uploads=True) as proxy, opened_page(browser, proxy.url) as page:
        proxy.cuts["PATCH /v1/uploads/"] = [100_000]
        choose(page, text)
        page.click("#start")
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        assert proxy.broken == ["PATCH /v1/uploads/"]
        assert httpx.get(f"{service.url}/v1/files/{ids(page)['file']}/content").content == text


def test_an_upload_is_found_again_after_a_reload(browser: "Browser", service: RunningService) -> None:
    """The page names the file and how much of it is there; when it is chosen again only the rest is sent."""
    half = len(TEXT) // 2
    head = {"upload-length": str(len(TEXT)), "upload-metadata": "filename c2VhLnR4dA==,filetype dGV4dC9wbGFpbg=="}
    begun = httpx.post(f"{service.url}/v1/uploads", headers=head).json()["id"]
    kind = {"content-type": "application/offset+octet-stream", "upload-offset": "0"}
    httpx.patch(f"{service.url}/v1/uploads/{begun}", content=TEXT[:half], headers=kind).raise_for_status()
    with opened_page(browser, service.url) as page:
        page.evaluate(f"localStorage.setItem('dist-attn ids', '{json.dumps({'upload': begun})}')")
        page.reload()
        page.wait_for_selector("#document-notice:has-text('of sea.txt was sent before')")
        sent: list[int] = []
        page.on("request", lambda request: sent.append(int(request.headers.get("upload-offset", -1))))
        choose(page)
        page.click("#start")
        encoded(page)
        assert [offset for offset in sent if offset >= 0] == [half]


def test_what_cannot_be_encoded_is_said_in_words(browser: "Browser", service: RunningService) -> None:
    """What cannot be read is refused in sentences, with nothing to try again, and the next file is read; after that the
    page is empty again, keeps no ids, and the service has forgotten the job and the file.
    """
    with opened_page(browser, service.url) as page:
        page.set_input_files("#file", files=[{"name": "none.txt", "mimeType": "text/plain", "buffer": b""}])
        page.wait_for_selector("#document-notice:has-text('none.txt is empty')")
        choose(page, b"good " * 60_000 + b"\xff\xfe bad", "latin.txt")
        page.click("#start")
        page.wait_for_selector("#document-notice.error:has-text('latin.txt is not in UTF-8')")
        assert page.inner_text("#run-phase") == "Failed" and page.locator("#vectors-view").is_hidden()
        assert page.locator("#document-notice button").count() == 0
        page.click("#another")
        choose(page)
        page.click("#start")
        encoded(page)
        kept = ids(page)
        page.click("#another")
        page.wait_for_selector("#pick")
        assert ids(page) == {} and page.locator("#run").is_hidden()
        for path in (f"/v1/jobs/{kept['job']}", f"/v1/files/{kept['file']}"):
            eventually(lambda path=path: httpx.get(service.url + path).status_code == 404, f"{path} to be gone")


NO_TEXTS = [
    (
        "book.odt",
        b"PK\x03\x04" + bytes(26) + b"mimetypeapplication/vnd.oasis.opendocument.text",
        "is a word processor's document; this page reads plain text",
    ),
    ("books.zip", b"PK\x03\x04" + bytes(26) + b"one.txt", "is an archive"),
    ("book.txt", "It was the best of times.".encode("utf-16"), "is text in UTF-16"),
    ("latin.txt", "It was a café.".encode("latin-1") * 20, "save it with the encoding UTF-8"),
    ("sound.ogg", b"OggS\x00\x02" + bytes(range(256)), "holds no text"),
]


def test_a_file_that_is_no_text_is_refused_before_it_is_sent(browser: "Browser", service: RunningService) -> None:
    """The page says what it is and what its owner can do about it, sends nothing of it, and the next file is taken."""
    with opened_page(browser, service.url) as page:
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.method != "GET" else None)
        for name, data, said in NO_TEXTS:
            page.set_input_files("#file", files=[{"name": name, "mimeType": "", "buffer": data}])
            page.wait_for_selector(f'#document-notice.error:has-text("{said}")')
            assert sent == [] and page.inner_text("#document-notice").startswith(f"{name} ")
            assert page.locator("#document-notice button").count() == 0
            assert page.locator("#pick").is_visible() and page.locator("#plan").is_hidden()
        choose(page)
        assert page.locator("#document-notice").is_hidden() and page.locator("#start").is_visible()


def test_a_document_is_read_as_its_text(browser: "Browser", service: RunningService) -> None:
    """The passages are those of its text, also after a reload, and afterwards the service has neither."""
    pytest.importorskip("kreuzberg", reason="pip install -e '.[documents]'")
    made, text, _ = GOOD["pdf"]
    take = (
        """async (bytes) => (await import("/page/api/documents.js")).isDocument(new Blob([Uint8Array.from(bytes)]))"""
    )
    with opened_page(browser, service.url) as page:
        for name in ("docx", "html", "epub"):
            assert page.evaluate(take, list(GOOD[name][0]()))
        choose(page, made(), "book.pdf")
        page.click("#start")
        for _ in ("at once", "after a reload"):
            page.wait_for_selector("#bar[data-phase=done]", state="attached")
            assert figure(page, "Tokens") == str(len(text.encode()))
            assert "Words of page" in find(page, "words")[0]
            assert page.locator(".hit .chapter").all_inner_texts() == ["page 1"]
            page.click(".hit")
            page.wait_for_selector('#passage-title:has-text("page 1")')
            page.reload()
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        kept = ids(page)["file"]
        page.click("#another")
        for file in (kept, kept.removesuffix("-text")):
            address = f"{service.url}/v1/files/{file}"
            eventually(lambda address=address: httpx.get(address).status_code == 404, f"{address} to be gone")


def find(page: "Page", words: str) -> list[str]:
    """The texts that are found, the best first."""
    page.fill("#query", words)
    page.press("#query", "Enter")
    page.wait_for_selector(".hit")
    texts: list[str] = []

    def are_there() -> bool:
        texts[:] = page.locator(".hit .text").all_inner_texts()
        return "…" not in texts

    eventually(are_there, "the texts of what was found")
    return texts


def marks(page: "Page", nth: int = 0) -> set[str]:
    """The words that are marked in what was found."""
    return set(page.locator(".hit").nth(nth).locator("mark").all_inner_texts())


def test_passages_are_found_by_their_words(browser: "Browser", service: RunningService) -> None:
    """The rare word decides and is marked, in any case and script; the same holds after a reload."""
    with opened_page(browser, service.url) as page:
        choose(page, TEXT + "Where is the SÜDLICHE Kap? 🙂 südlich\n".encode() + TEXT)
        page.click("#start")
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        for _ in ("the file", "the service"):
            assert "217" in find(page, "paragraph 217 of grün")[0] and marks(page) == {"217"}
            assert "SÜDLICHE" in find(page, "südliche südlich")[0]
            assert marks(page) == {"SÜDLICHE", "südlich"}
            page.reload()
            page.wait_for_selector("#bar[data-phase=done]", state="attached")
        page.fill("#query", "nowhere whatsoever")
        page.press("#query", "Enter")
        page.wait_for_selector("#found:has-text('No passage has any of these words')")
        page.click("#found button:text-is('Look by meaning')")
        page.wait_for_selector(".hit")
        assert re.fullmatch(r"1st of \d+ passages by its meaning", page.locator(".hit .why").first.inner_text())
        assert page.locator(".hit mark").count() == 0


CHAPTERS = "".join(
    f"CHAPTER {name}\n\n"
    + f"This line of a chapter was broken where the next word did not fit,\nand so was this one, which goes on and on "
    f"until\nit is as long as others are. The {animal} lives here.\n\nShort.\n\n" * 4
    for name, animal in (("I. Of Dogs", "dog"), ("II. Of Cats", "cat"), ("III. Of Cows", "cow"))
)


def test_what_is_found_tells_its_chapter_and_place(browser: "Browser", service: RunningService) -> None:
    """A card names the chapter, the place and why it came; the passage opens below it with its lines joined."""
    with opened_page(browser, service.url) as page:
        choose(page, f"A Book\n\n\nBOOK THE FIRST\n\n\n{CHAPTERS}".encode(), "animals.txt")
        page.click("#start")
        page.wait_for_selector("#bar[data-phase=done]", state="attached")
        find(page, "cat")
        card = page.locator(".hit").first
        assert card.locator(".chapter").inner_text() == "CHAPTER II. Of Cats · BOOK THE FIRST"
        share = int(card.locator(".place").inner_text().removeprefix("at ").removesuffix(" %"))
        assert 30 < share < 70 and card.locator(".place b").evaluate("(mark) => mark.style.left").startswith("calc(")
        assert card.locator(".why").inner_text().startswith("1st of ")
        card.click()
        page.wait_for_selector(".hit[aria-expanded=true] + #passage mark:text-is('cat')")
        assert "CHAPTER II. Of Cats" in page.inner_text("#passage-title")
        page.keyboard.press("Escape")
        page.wait_for_selector("#passage", state="hidden")
        set_text = """async (text) => (await import("/page/view/set_text.js")).joined(text)"""
        joined = page.evaluate(set_text, CHAPTERS)
        assert len(joined) == len(CHAPTERS) and "did not fit, and so was this one" in joined
        assert "lives here.\n\nShort.\n\n" in joined
        verse = "So long as men can breathe,\nor eyes can see,\nSo long lives this.\n"
        assert page.evaluate(set_text, verse) == verse


def test_the_sample_is_read_and_asked_with_one_click(browser: "Browser", service: RunningService) -> None:
    """A question on the empty page reads the sample and is asked; the others are offered before anything is."""
    with opened_page(browser, service.url) as page:
        assert ".txt" in page.inner_text("#drop") and "PDF" in page.inner_text("#drop")
        page.click("#sample-questions button:has-text('cask of wine')")
        page.wait_for_selector(".hit .chapter:has-text('V. The Wine-shop')")
        assert "cask" in marks(page) and page.input_value("#query").startswith("A cask")
        page.reload()
        page.click("#found button:has-text('garret')")
        page.wait_for_selector(".hit")


def test_results_come_first(browser: "Browser", service: RunningService) -> None:
    """On a phone search and results stand above the plots; on a wide screen they are the wider part."""
    with opened_page(browser, service.url, viewport={"width": 390, "height": 844}) as page:
        choose(page)
        page.click("#start")
        encoded(page)
        find(page, "217")
        box = {name: page.locator(name).bounding_box() or {} for name in ("#search", ".hit >> nth=0", "#map", "#plane")}
        assert box["#search"]["y"] < box[".hit >> nth=0"]["y"] < box["#map"]["y"] < box["#plane"]["y"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 1440, "height": 900})
        find_box, map_box = page.locator(".find").bounding_box(), page.locator("#map").bounding_box()
        assert find_box is not None and map_box is not None and find_box["width"] > 2 * map_box["width"]


def test_a_service_that_is_gone_is_said_once(browser: "Browser", service: RunningService) -> None:
    """The document says it, and the page above does not repeat it."""
    with breaking_proxy(service.port) as proxy, opened_page(browser, proxy.url) as page:
        choose(page)
        proxy.lose()
        page.click("#start")
        page.wait_for_selector("#document-notice:has-text('cannot be reached')")
        page.wait_for_selector("#service-state:has-text('Not reached')")
        eventually(lambda: page.inner_text("body").count("cannot be reached") == 1, "one of two to be taken back")
        assert "cannot be reached" in page.inner_text("#document-notice")


def test_a_wrong_key_is_refused_and_the_right_one_works(
    browser: "Browser", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong key is refused in words, the right one stays in the tab, and what the page prints runs with it as set."""
    with (
        running_service(tmp_path, FakeEngine(keep=False), api_keys=(digest(USER),)) as running,
        opened_page(browser, running.url) as page,
    ):
        page.wait_for_selector("#key-dialog[open] >> text=asks for a key")
        page.fill("#key", "wrong-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-dialog[open] >> text=does not know this key")
        page.fill("#key", USER)
        page.keyboard.press("Enter")
        page.wait_for_selector("#service-state.ready:has-text('tiny')")
        choose(page)
        page.click("#start")
        encoded(page)
        stored = page.evaluate("JSON.stringify({...localStorage})")
        assert USER not in stored and digest(USER) not in stored and "job_" in stored
        page.click("#tab-code")
        assert USER not in page.content()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(KEY_VARIABLE, USER)
        (tmp_path / "sea.txt").write_bytes(TEXT)
        for command in page.locator("#recipes code").all_inner_texts():
            answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
            assert f"${KEY_VARIABLE}" in command and "invalid_api_key" not in answer.stdout
        page.click("#code-python")
        for block in page.locator("#recipes code").all_inner_texts():
            names: dict[str, Any] = {}
            exec(compile(block, "recipe", "exec"), names)
            names["client"].close()
        assert read_settings(environment=os.environ).settings == read_settings(environment={}).settings
