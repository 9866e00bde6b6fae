"""What the pages of a built site would fetch from another host: scripts, styles, pictures, frames, fonts."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import final

__all__ = ["from_elsewhere"]

_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
# What a browser fetches by itself; a link that a reader follows is none of it, nor is a canonical address.
_FETCHING = {
    "script": "src", "img": "src", "iframe": "src", "embed": "src", "source": "src", "audio": "src", "video": "src",
    "object": "data", "link": "href", "use": "href", "image": "href",
}  # fmt: skip
_ONLY_NAMES = {"canonical", "alternate", "author", "license", "next", "prev"}


@final
class _Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        address = values.get(_FETCHING.get(tag, ""), "")
        relations = set(values.get("rel", "").split())
        if _ELSEWHERE.match(address) and not (tag == "link" and relations & _ONLY_NAMES):
            self.found.append(f"<{tag}> fetches {address}")
        candidates = [part.split()[0] for part in values.get("srcset", "").split(",") if part.split()]
        self.found += [f"<{tag}> fetches {part}" for part in candidates if _ELSEWHERE.match(part)]
        self.found += [f"a style of <{tag}> fetches {url}" for url in _IN_STYLE.findall(values.get("style", ""))]


def from_elsewhere(site: Path) -> list[str]:
    """A line for each thing that a page or a style sheet of the folder would fetch from another host."""
    lines = []
    for path in sorted(site.rglob("*.html")):
        text, parser = path.read_text(), _Fetches()
        parser.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        found = parser.found + [f"a style fetches {url}" for style in styles for url in _IN_STYLE.findall(style)]
        lines += [f"{path.relative_to(site)}: {what}" for what in found]
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        lines += [f"{path.relative_to(site)}: fetches {url}" for url in _IN_STYLE.findall(path.read_text())]
    return lines
