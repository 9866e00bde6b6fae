"""Filed results: the newest JSON of each case is all that is filed, and each becomes a table and a figure."""

from pathlib import Path

import pytest

from benchmarks.filed import RESULTS
from benchmarks.studies import Drawn
from benchmarks.verify import ROOT
from dist_attn_research import filed

RESULT_FILES = sorted((ROOT / RESULTS).glob("*.json"))


@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_each_filed_result_becomes_a_table_and_a_figure(path: Path, tmp_path: Path) -> None:
    """What is read from the JSON is named as its file, says where it was measured, and is drawn where it has curves."""
    finding = filed.read(path)
    text = finding.as_markdown()
    assert finding.case == path.stem
    assert (text.startswith("# ") and "| ---" in text) or "|---" in text
    assert "commit" in text
    if isinstance(finding, Drawn):
        finding.draw(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_pages_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is newer than its result is left as it is, and pages of results that are gone are removed."""
    results, pages = tmp_path / "results", tmp_path / "pages"
    results.mkdir()
    pages.mkdir()
    (results / "page-tokens.json").write_bytes((ROOT / RESULTS / "page-tokens.json").read_bytes())
    (pages / "gone.md").write_text("gone")
    filed.write(results, pages)
    assert sorted(path.name for path in pages.iterdir()) == ["page-tokens.md", "service-promises.md"]
    monkeypatch.setattr(filed, "read", lambda _: pytest.fail("written again"))
    filed.write(results, pages)


def test_results_are_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A name prints the table of its result; a name that nothing is filed under ends with 2 and says what there is."""
    assert filed.main(["forward"]) == 0
    assert capsys.readouterr().out.startswith("# forward\n")
    assert filed.main(["sideways"]) == 2
    assert "nothing is filed under 'sideways'; there are backward, " in capsys.readouterr().err
