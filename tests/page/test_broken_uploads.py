"""Uploads of the page that break: what was sent is not sent again, and the result is that of an undisturbed one."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.page.test_document_page import choose, ids
from tests.support.breaking_proxy import BreakingProxy, breaking_proxy
from tests.support.browser import opened_page
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.service_process import running_process
from tests.support.service_server import RunningService, running_service

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

TEXT = "".join(f"Line {i} of a long text, and {i * 7919 % 100_003} is its number.\n" for i in range(30_000)).encode()
PIECE = 256 << 10  # what the page begins with
IN_THE_SECOND = [1 << 30, 200_000]  # bytes of each piece after which its connection breaks
DONE = "#bar[data-phase=done]"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with an engine of the tests."""
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(keep=False, credit=1 << 16)) as running:
        yield running


class Sent:
    """What a page sends of its uploads: how many it begins, and from which byte each piece goes."""

    def __init__(self, page: "Page") -> None:
        self.begun = 0
        self.offsets: list[int] = []
        page.on("request", self._take)

    def _take(self, request: "Request") -> None:
        self.begun += request.method == "POST" and request.url.endswith("/v1/uploads")
        if request.method == "PATCH":
            self.offsets.append(int(request.headers["upload-offset"]))

    def only_forward(self) -> bool:
        """Whether one upload was begun, and no piece began before an earlier one."""
        return self.begun == 1 and self.offsets == sorted(self.offsets)


def received(url: str, page: "Page") -> int:
    """Bytes that the service has of the page's upload."""
    count: int = httpx.get(f"{url}/v1/uploads/{ids(page)['upload']}").json()["received_bytes"]
    return count


def is_the_text(url: str, page: "Page") -> bool:
    """Whether the stored file is the text, and every token of it was encoded."""
    stored = httpx.get(f"{url}/v1/files/{ids(page)['file']}/content").content
    job = httpx.get(f"{url}/v1/jobs/{ids(page)['job']}").json()
    same = hashlib.sha256(stored).digest() == hashlib.sha256(TEXT).digest()
    return same and job["status"] == "succeeded" and job["progress"]["tokens"] == len(TEXT)


def lost(page: "Page", proxy: BreakingProxy) -> None:
    """Let the connection break in the middle of the upload, and stay away until the page gives up."""
    proxy.broke = proxy.lose
    proxy.cuts["PATCH /v1/uploads/"] = IN_THE_SECOND[:]
    page.clock.install()
    page.click("#start")
    page.wait_for_selector("#document-notice.wait:has-text('Going on by itself')")
    while not page.locator("#document-notice.error").count():
        page.clock.fast_forward(9000)
        page.wait_for_timeout(20)


def test_a_service_that_is_killed_in_an_upload(browser: "Browser", tmp_path: Path) -> None:
    """The page says that it goes on by itself, and does so from the byte that the next process finds on disk."""
    address = f"ipc://{tmp_path}/engine"
    with (
        fake_controller(FakeEngine(keep=False, credit=1 << 16), address),
        running_process(tmp_path, address) as (process, url),
        running_process(tmp_path, address) as (_, next_url),
        breaking_proxy(int(url.rpartition(":")[2]), uploads=True) as proxy,
        opened_page(browser, proxy.url) as page,
    ):
        sent = Sent(page)
        proxy.cuts["PATCH /v1/uploads/"] = IN_THE_SECOND[:]
        proxy.broke = process.kill
        choose(page, TEXT, "long.txt")
        page.click("#start")
        page.wait_for_selector("#document-notice.wait:has-text('Going on by itself')")
        process.wait(60)
        there = received(next_url, page)
        proxy.target = int(next_url.rpartition(":")[2])
        page.wait_for_selector(DONE, state="attached")
        assert there >= PIECE and sent.offsets[:3] == [0, PIECE, there] and sent.only_forward()
        assert is_the_text(next_url, page)


def test_trying_again_goes_on(browser: "Browser", service: RunningService) -> None:
    """A connection that stays away is given up in words; "Try again" sends what the service does not have."""
    with breaking_proxy(service.port, uploads=True) as proxy, opened_page(browser, proxy.url) as page:
        sent = Sent(page)
        choose(page, TEXT, "long.txt")
        lost(page, proxy)
        there, before = received(service.url, page), len(sent.offsets)
        words = page.inner_text("#document-notice")
        assert "cannot be reached" in words and f"At least {100 * PIECE // len(TEXT)} %" in words
        proxy.target = service.port
        page.click("#document-notice button:text-is('Try again')")
        page.wait_for_selector(DONE, state="attached")
        assert sent.offsets[before] == there >= PIECE and sent.only_forward()
        assert is_the_text(service.url, page)


def test_a_connection_that_is_lost_without_a_word(browser: "Browser", service: RunningService) -> None:
    """A piece that nobody answers is given up after a while; what came of it is kept, and the rest is sent."""
    with breaking_proxy(service.port, uploads=True) as proxy, opened_page(browser, proxy.url) as page:
        sent = Sent(page)
        choose(page, TEXT, "long.txt")
        page.clock.install()
        proxy.silent, proxy.cuts["PATCH /v1/uploads/"] = True, IN_THE_SECOND[:]
        page.click("#start")
        while not proxy.broken:
            page.wait_for_timeout(20)
        page.clock.fast_forward(31_000)
        page.wait_for_selector(DONE, state="attached")
        assert sent.offsets[:2] == [0, PIECE] and sent.offsets[2] >= PIECE and sent.only_forward()
        assert is_the_text(service.url, page)


def test_a_file_that_was_changed_meanwhile(browser: "Browser", service: RunningService, tmp_path: Path) -> None:
    """A file that is no longer the one that was chosen is not sent; the page says what to do."""
    file = tmp_path / "notes.txt"
    file.write_bytes(TEXT)
    with opened_page(browser, service.url) as page:
        page.set_input_files("#file", file)
        page.wait_for_selector("#plan-figures:not([aria-busy])")
        file.write_bytes(TEXT[:-100])
        page.click("#start")
        notice = page.wait_for_selector("#document-notice.error:has-text('can no longer be read')")
        assert notice is not None and "notes.txt" in notice.inner_text()


def test_an_upload_that_the_service_has_lost(browser: "Browser", service: RunningService) -> None:
    """When nothing is left of it the page sends the file anew; a failed encoding sends nothing at all again."""
    with breaking_proxy(service.port, uploads=True) as proxy, opened_page(browser, proxy.url) as page:
        sent = Sent(page)
        choose(page, TEXT, "long.txt")
        lost(page, proxy)
        httpx.delete(f"{service.url}/v1/uploads/{ids(page)['upload']}").raise_for_status()
        proxy.target = service.port
        service.engine.fail_at = 1
        page.click("#document-notice button:text-is('Try again')")
        page.wait_for_selector("#document-notice.error:has-text('rank 1 died')")
        assert sent.begun == 2 and 0 in sent.offsets[1:]
        service.engine.fail_at, before = None, len(sent.offsets)
        page.click("#document-notice button:text-is('Try again')")
        page.wait_for_selector(DONE, state="attached")
        assert len(sent.offsets) == before and is_the_text(service.url, page)
