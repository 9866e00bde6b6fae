"""Filed results: the newest JSON of each case is all that is filed, and each becomes a table and a figure."""

import importlib
import inspect
from pathlib import Path

import pytest

from benchmarks.cases import CASES
from benchmarks.filed import RESULTS
from benchmarks.run import STUDIES as OF_TARGETS
from benchmarks.setting import ROOT
from benchmarks.targets import TARGETS
from dist_attn_papers import filed
from dist_attn_papers.__main__ import PROGRAMS, main
from dist_attn_papers.studies import STUDIES
from dist_attn_papers.tables.experiments import EXPERIMENTS

RESULT_FILES = sorted((ROOT / RESULTS).glob("*.json"))
PAGES = ROOT / "build/results"  # where the site looks for them, so that it need not draw them again


@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_each_filed_result_becomes_a_table_and_a_figure(path: Path) -> None:
    """What is read from the JSON is named as its file, says where it was measured, and is drawn where it has curves."""
    finding, page = filed.read(path), PAGES / f"{path.stem}.md"
    PAGES.mkdir(parents=True, exist_ok=True)
    filed.write_page(finding, page)
    text = page.read_text()
    assert finding.case.replace(" ", "-") == path.stem
    assert (text.startswith("# ") and "| ---" in text) or "|---" in text
    assert "commit" in text
    if isinstance(finding, filed.Drawn):
        assert page.with_suffix(".png").stat().st_size > 5_000


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


def test_the_list_says_what_each_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names every case, study, experiment and program with its question, and runs none."""
    assert main(["--list"]) == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    groups = (CASES, OF_TARGETS, STUDIES, EXPERIMENTS, PROGRAMS)
    assert list(listed) == [name for group in groups for name in group]
    assert all(listed.values())


def test_every_target_is_measured_by_name() -> None:
    """A target's benchmark is a case, a study of the targets, one of the studies here, or `make gpu`."""
    assert {target.benchmark for target in TARGETS} - {"gpu"} <= CASES.keys() | OF_TARGETS.keys() | STUDIES.keys()


def test_every_name_has_tests_that_are_there() -> None:
    """Studies and experiments name files of tests that exist."""
    named = [test for one in (*STUDIES.values(), *EXPERIMENTS.values()) for test in one.tests]
    assert [test for test in named if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("module", [module for module, _ in PROGRAMS.values()])
def test_every_program_can_be_started(module: str) -> None:
    """A program has a `main` that takes its arguments."""
    assert len(inspect.signature(importlib.import_module(f"dist_attn_papers.{module}").main).parameters) == 1


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody measures ends with code 2 and one line that names what there is."""
    assert main(["sideways"]) == 2
    said = capsys.readouterr().err
    assert "forward" in said and "mixers" in said and said.count("\n") == 1
