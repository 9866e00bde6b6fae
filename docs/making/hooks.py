"""Hooks of mkdocs: pages keep the links that work on a code host, and the site needs no network.

* A link that leads out of docs/ (`../benchmarks/results/x.md`) takes its file along into the site.
* `docs/x.md` and `benchmarks/results/NAME-*` in backticks become links to the page, or to the newest such result.
* Sections of docs/papers.md end with the figures of the results that they name.
* A folder in the navigation (`decisions/`) stands for its pages.
* A built page that would fetch anything from another host is an error.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

import fetched
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = "benchmarks/results"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=[\s)])")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_NAMED_PAGE = re.compile(r"(?<!\[)`(?:docs/((?:[\w-]+/)*[\w-]+\.md))`")
_NAMED_RESULT = re.compile(r"(?<!\[)`(benchmarks/results/([\w-]+?)(?:-?\*|-\d{4}-\d\d-\d\d-\w+\.md))`")
_DATED = re.compile(r"(.+)-(\d{4}-\d\d-\d\d)-(\w+)")
log = logging.getLogger("mkdocs.hooks.dist_attn")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Folders in the navigation become their pages."""
    config.nav = [_spread(entry) for entry in config.nav or []]
    return config


def _spread(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _spread(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_spread(one) for one in entry]
    if not str(entry).endswith("/"):
        return entry
    folder = next(base / entry for base in (DOCS, ROOT) if (base / entry).is_dir())
    names = sorted(path.name for path in folder.glob("*.md"))
    return [f"{entry}{name}" for name in sorted(names, key=lambda name: name != "README.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What the pages link to outside docs/ joins the site, and so do all filed results."""
    wanted = {ROOT / name for name in PROJECT_PAGES}
    wanted |= {path for path in (ROOT / RESULTS).iterdir() if path.suffix in (".md", ".png")}
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for page in [*pages, *(path for path in wanted if path.suffix == ".md")]:
        text = _FENCE.sub("", page.read_text())
        for url, _ in _LINK.findall(text):
            target = (page.parent / url).resolve()
            inside = target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
            if "://" not in url and target.is_file() and inside:
                wanted.add(target)
    for path in sorted(wanted):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to where their files are in the site; code blocks stay as they are."""
    if page.file.src_uri == "papers.md":
        markdown = with_figures(markdown)
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _linked(part, page.file) for part in parts)


def _linked(text: str, file: File) -> str:
    here = Path(file.abs_src_path or DOCS / file.src_uri)

    def moved(match: re.Match[str]) -> str:
        url, fragment = match[1], match[2] or ""
        target = (here.parent / url).resolve()
        if "://" in url or url.startswith("mailto:"):
            return url + fragment
        if not target.is_file():
            log.warning("%s links to %s, which is no file", file.src_uri, url)  # an error: the build is strict
            return url + fragment
        return _way(file, _place(target)) + fragment

    def page_link(match: re.Match[str]) -> str:
        named = DOCS / match[1]
        return f"[{match[0]}]({_way(file, match[1])})" if named.is_file() and named != here else match[0]

    def result_link(match: re.Match[str]) -> str:
        found = newest(match[2], ".md")
        return match[0] if found is None else f"[{match[0]}]({_way(file, f'{RESULTS}/{found.name}')})"

    return _NAMED_RESULT.sub(result_link, _NAMED_PAGE.sub(page_link, _LINK.sub(moved, text)))


def _place(target: Path) -> str:
    """Where a file of the repository is in the site."""
    return target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()


def _way(file: File, place: str) -> str:
    return Path(os.path.relpath(place, Path(file.src_uri).parent)).as_posix()


def newest(name: str, suffix: str) -> Path | None:
    """The newest filed result of exactly this name, by the date in its file's name."""
    dated = [(match, path) for path in (ROOT / RESULTS).glob(f"*{suffix}") if (match := _DATED.fullmatch(path.stem))]
    own = [(match[2], path) for match, path in dated if match[1] == name]
    return max(own)[1] if own else None


def with_figures(markdown: str) -> str:
    """Sections end with the figure of each result that they name; each figure stands once."""
    sections, shown = markdown.split("\n## "), set()
    for index, section in enumerate(sections):
        for match in _NAMED_RESULT.finditer(section):
            figure = newest(match[2], ".png")
            if figure is not None and figure not in shown:
                shown.add(figure)
                sections[index] += f"\n\n![{match[2]}, as filed](../{RESULTS}/{figure.name})\n"
    return "\n## ".join(sections)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises: PluginError where a built page would fetch something from another host."""
    found = fetched.from_elsewhere(Path(config.site_dir))
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise PluginError(f"the site is to work without a network, but {'; '.join(found[:5])}{more}")
    log.info("nothing in the site is fetched from another host")
