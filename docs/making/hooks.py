"""Hooks of mkdocs: pages keep the links that work on a code host, and the site needs no network.

* Pages and figures are made of all filed results, in a folder that git ignores.
* A link that leads out of docs/ (`../CONTRIBUTING.md`) takes its file along into the site; one to a filed result
  (`../benchmarks/results/x.json`) leads to its page.
* `docs/x.md` and `benchmarks/results/x.json` in backticks become links, and sections end with the figures of the
  results that they name so.
* A folder in the navigation (`decisions/`) stands for its pages.
* A built page that would fetch anything from another host is an error.
"""

import logging
import os
import re
import subprocess
import sys
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
RENDERED = ROOT / "build/results"
SOURCES = ("", "service", "client", "papers")
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
PAPERS = "papers/docs"

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=[\s)])")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_NAMED_PAGE = re.compile(r"(?<!\[)`(?:docs/((?:[\w-]+/)*[\w-]+\.md))`")
_NAMED_RESULT = re.compile(r"(?<!\[)`benchmarks/results/([\w-]+)\.json`")
log = logging.getLogger("mkdocs.hooks.dist_attn")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Results get their pages, and folders in the navigation become their pages.

    Raises: PluginError where a result cannot be shown.
    """
    command = [sys.executable, "-m", "dist_attn_papers.filed", "--into", str(RENDERED)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in SOURCES)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"filed results could not be shown: {done.stderr}")
    config.nav = [_spread(entry) for entry in config.nav or []]
    return config


def _spread(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _spread(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_spread(one) for one in entry]
    if not str(entry).endswith("/"):
        return entry
    folders = [base / entry for base in (DOCS, ROOT)] + [RENDERED] * (entry == f"{RESULTS}/")
    names = [path.name for folder in folders for path in folder.glob("*.md")]
    return [f"{entry}{name}" for name in sorted(names, key=lambda name: name != "README.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What the pages link to outside docs/ joins the site, and so do all filed results."""
    wanted = {ROOT / name for name in PROJECT_PAGES}
    wanted |= {ROOT / RESULTS / "README.md", *RENDERED.iterdir(), *(ROOT / PAPERS).glob("*.md")}
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for page in [*pages, *(path for path in wanted if path.suffix == ".md")]:
        text = _FENCE.sub("", page.read_text())
        for url, _ in _LINK.findall(text):
            target = (page.parent / url).resolve()
            inside = target.is_relative_to(ROOT) and not target.is_relative_to(DOCS)
            if "://" not in url and target.is_file() and inside:
                wanted.add(target)
    for path in sorted(wanted):
        files.append(File.generated(config, _place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to where their files are in the site; code blocks stay as they are."""
    markdown = with_figures(markdown, page.file)
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
        return f"[{match[0]}]({_way(file, f'{RESULTS}/{match[1]}.md')})"  # the build says if there is none

    return _NAMED_RESULT.sub(result_link, _NAMED_PAGE.sub(page_link, _LINK.sub(moved, text)))


def _place(target: Path) -> str:
    """Where a file of the repository is in the site; a filed result stands there as its page."""
    if target.is_relative_to(RENDERED):
        return f"{RESULTS}/{target.name}"
    if target.parent == ROOT / RESULTS:
        return f"{RESULTS}/{target.with_suffix('.md').name}"
    return target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()


def _way(file: File, place: str) -> str:
    return Path(os.path.relpath(place, Path(file.src_uri).parent)).as_posix()


def with_figures(markdown: str, file: File) -> str:
    """Sections end with the figure of each result that they name; each figure stands once."""
    sections, shown = markdown.split("\n## "), set()
    for index, section in enumerate(sections):
        for match in _NAMED_RESULT.finditer(section):
            figure = RENDERED / f"{match[1]}.png"
            if figure.is_file() and figure not in shown:
                shown.add(figure)
                way = os.path.relpath(figure, Path(file.abs_src_path or DOCS / file.src_uri).parent)
                sections[index] += f"\n\n![{match[1]}, as filed]({way})\n"
    return "\n## ".join(sections)


def on_post_build(config: MkDocsConfig) -> None:
    """Raises: PluginError where a built page would fetch something from another host."""
    found = fetched.from_elsewhere(Path(config.site_dir))
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise PluginError(f"the site is to work without a network, but {'; '.join(found[:5])}{more}")
    log.info("nothing in the site is fetched from another host")
