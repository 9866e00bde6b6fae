"""The web page in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["opened_page"]

PATIENCE_MS = 60_000


@contextmanager
def opened_page(browser: "Browser", url: str, **options: Any) -> Iterator["Page"]:
    """The page at an address, once it is ready, in a profile of its own.

    Fails if it complains, breaks its own policy, or asks for anything from elsewhere.
    """
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if _is_complaint(line.text, line.type) else None)
    page.on("request", lambda request: complaints.append(request.url) if not _is_ours(request.url, url) else None)
    try:
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
        assert complaints == []
    finally:
        context.close()


def _is_complaint(text: str, kind: str) -> bool:
    """The browser reports every refused request as an error; those are the page's to put into words."""
    return kind == "error" and not text.startswith("Failed to load resource")


def _is_ours(address: str, url: str) -> bool:
    return address.startswith((url, "blob:", "data:"))
