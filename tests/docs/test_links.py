"""Links between pages work on a code host as in the site: they lead to files of the repository, and to headings."""

import re
from functools import cache
from pathlib import Path

from tests.docs.blocks import ROOT, pages

_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The names that a code host gives the headings of a page; the second of equal ones has a number."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)


def test_every_link_leads_somewhere() -> None:
    """Each relative link of a page names a file, and where it names a heading, that heading is there."""
    assert len(pages()) > 50
    assert [wrong for page in pages() for wrong in _wrong_links(page)] == []


def _wrong_links(page: Path) -> list[str]:
    """Of one page, in words."""
    wrong, name = [], page.relative_to(ROOT).as_posix()
    for url, fragment in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in url or url.startswith("mailto:"):
            continue
        target = (page.parent / url).resolve() if url else page
        if not target.is_file():
            wrong.append(f"{name}: {url} is no file")
        elif fragment and target.suffix == ".md" and fragment not in anchors(target):
            wrong.append(f"{name}: {url} has no heading #{fragment}")
    return wrong


def test_every_named_result_is_filed() -> None:
    """Each filed result that a page names in backticks, which the site makes a link of, is there."""
    named = {name for page in pages() for name in re.findall(r"`(benchmarks/results/[\w-]+\.json)`", page.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
