"""The documentation site: it builds strictly, needs no network, and its generated pages are those of the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.making import docstrings, fetched, figures, reference
from tests.support.source_path import SOURCE_PATH

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; the build itself looks for what would be fetched from elsewhere."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": SOURCE_PATH}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing in the site is fetched from another host" in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly(site: Path) -> None:
    """Every page is in the navigation, every link and anchor leads somewhere, and every docstring can be read."""
    for page in ("index", "tutorial", "how-to/many-processes", "explanation/carry", "reference/ops", "decisions/index"):
        assert (site / f"{page}.html").is_file(), page
    assert "linear_attention" in (site / "reference/ops.html").read_text()
    assert (site / "search/search_index.json").stat().st_size > 100_000


@pytest.mark.slow
def test_results_are_part_of_the_site(site: Path) -> None:
    """The page of the papers' tables shows the filed figures, and links to the tables that they come from."""
    page = (site / "papers/docs/tables.html").read_text()
    assert page.count('src="../../benchmarks/results/') >= 8
    assert 'href="../../benchmarks/results/paper-rfa-table1.html"' in page
    filed = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert filed < {path.stem for path in (site / "benchmarks/results").glob("*.html")}
    assert len(list((site / "benchmarks/results").glob("*.png"))) > 30


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/x"></script>',
        '<link rel="stylesheet" href="//fonts.example.org/css">',
        '<img srcset="a.png 1x, http://example.org/b.png 2x">',
        '<p style="background: url(https://example.org/c.png)">',
        "<style>@import 'https://example.org/d.css'</style>",
    ],
)
def test_what_would_be_fetched_is_found(text: str, tmp_path: Path) -> None:
    """Scripts, styles, fonts and pictures of other hosts are found wherever HTML can hide them."""
    (tmp_path / "page.html").write_text(text)
    assert len(fetched.from_elsewhere(tmp_path)) == 1


def test_what_a_reader_follows_is_not_fetched(tmp_path: Path) -> None:
    """Links to other hosts, the page's own address and what lies beside the page are no fetches."""
    text = '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org"><img src="a.png">'
    (tmp_path / "page.html").write_text(text)
    assert fetched.from_elsewhere(tmp_path) == []


@pytest.mark.parametrize("name", reference.PAGES)
def test_generated_pages_are_those_of_the_code(name: str) -> None:
    """The pages of commands, settings and routes say what the code says; `make docs-refresh` writes them."""
    assert (ROOT / reference.FOLDER / name).read_text() == reference.PAGES[name]()


def test_the_readme_has_one_screen() -> None:
    """README.md has at most 50 lines and one picture; what more there is to say stands in docs/."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 50
    assert text.count("![") == 1


def test_every_figure_is_filed_and_small() -> None:
    """Each figure that the pages show is drawn by the code, lies in docs/figures, and has less than 150 kB."""
    filed = {path.name: path.stat().st_size for path in (ROOT / figures.FOLDER).iterdir()}
    assert filed.keys() == figures.FIGURES.keys()
    assert max(filed.values()) < 150_000


def test_the_drawn_carry_is_the_real_one() -> None:
    """The numbers in the drawing of the carry are running sums over all ranks."""
    found = figures.carried_example()
    assert [value for sums in found["sums"] for value in sums] == [1, 3, 3, 4, 7, 8, 10, 12]
    assert found["before"] == [0, 3, 4, 8]


def test_the_text_says_what_the_figure_of_recall_shows() -> None:
    """64 random vectors give 64 keys back and 256 only in part; 256 vectors hold these 256, and softmax all."""
    assert figures.recall(64, 64) > 0.99 > 0.8 > figures.recall(256, 64)
    assert figures.recall(256, 256) > 0.99 and figures.recall(256, None) > 0.99


def test_docstrings_become_lists_and_paragraphs() -> None:
    """Labelled parts are paragraphs, lines of names and words are list items, tables and prose stay as they are."""
    text = (
        "One.\nShapes: x [B]  y [C]\n    floor   max(den),\n            one-sided\n    exact   as is\nEnd.\n| a  | b |"
    )
    shown = ["One.", "", "**Shapes.** x [B]  y [C]", "", "* `floor` max(den),", "    one-sided", "* `exact` as is"]
    assert docstrings.as_markdown(text).splitlines() == [*shown, "", "End.", "| a  | b |"]
