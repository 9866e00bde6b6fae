"""Everything that can be measured is found by its name."""

import importlib
import inspect

import pytest

from benchmarks.cases import CASES
from benchmarks.studies import STUDIES as OF_TARGETS
from benchmarks.verify import ROOT
from dist_attn_research.__main__ import PROGRAMS, main
from dist_attn_research.papers.experiments import EXPERIMENTS
from dist_attn_research.studies import STUDIES


def test_the_list_says_what_each_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names every case, study, experiment and program with its question, and runs none."""
    assert main(["--list"]) == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    groups = (CASES, OF_TARGETS, STUDIES, EXPERIMENTS, PROGRAMS)
    assert list(listed) == [name for group in groups for name in group]
    assert all(listed.values())


def test_every_name_has_tests_that_are_there() -> None:
    """Studies and experiments name files of tests that exist."""
    named = [test for one in (*STUDIES.values(), *EXPERIMENTS.values()) for test in one.tests]
    assert [test for test in named if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("module", [module for module, _ in PROGRAMS.values()])
def test_every_program_can_be_started(module: str) -> None:
    """A program has a `main` that takes its arguments."""
    assert len(inspect.signature(importlib.import_module(f"dist_attn_research.{module}").main).parameters) == 1


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody measures ends with code 2 and one line that names what there is."""
    assert main(["sideways"]) == 2
    said = capsys.readouterr().err
    assert "forward" in said and "mixers" in said and said.count("\n") == 1
