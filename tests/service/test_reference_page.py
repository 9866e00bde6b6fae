"""/docs: the whole API on one page that needs nothing from elsewhere."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest
from dist_attn_service.http.pages import render_reference

from tests.support.service_server import RunningService, running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


class Page(HTMLParser):
    """The elements of a page, where they point, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember an element."""
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src"):
                self.targets.append(value or "")
            elif name == "id":
                self.ids.add(value or "")
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that the innermost one ends."""
        assert self._open.pop() == tag


def test_it_needs_nothing_from_elsewhere(service: RunningService) -> None:
    """No script, no font, no picture, no address outside; the browser is told to load none either."""
    answer = httpx.get(f"{service.url}/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = Page(answer.text)
    assert not page.tags & {"script", "link", "img", "iframe", "form"}
    assert not re.search(r"https?://|url\(|@import", answer.text)
    assert {target for target in page.targets if not target.startswith("#")} == {"openapi.json"}
    assert {target[1:] for target in page.targets if target.startswith("#")} <= page.ids


def test_it_shows_every_route_and_every_option(service: RunningService) -> None:
    """Each path of the OpenAPI document, and each property of each of its shapes."""
    text = httpx.get(f"{service.url}/docs").text
    document = httpx.get(f"{service.url}/openapi.json").json()
    for path in document["paths"]:
        assert f"<code>{path}</code>" in text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in text
        for key in schema.get("properties", {}):
            assert f"<code>{key}</code>" in text


def test_nothing_in_the_document_becomes_markup() -> None:
    """Names and descriptions are text, whatever is in them."""
    evil = '<script>"&'
    operation = {"summary": evil, "description": evil, "tags": [evil], "responses": {"200": {"description": evil}}}
    schema = {"description": evil, "properties": {evil: {"type": evil, "description": evil, "enum": [evil]}}}
    page = render_reference(
        {
            "info": {"title": evil, "version": evil, "description": evil},
            "paths": {f"/{evil}": {"get": operation}},
            "components": {"schemas": {evil: schema}},
        }
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page
