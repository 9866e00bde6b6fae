"""The study of the longest exact attention: what is tracked, how lengths follow from it, and what is filed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import report, run
from benchmarks.measured import Study
from benchmarks.memory import TrackedMemory
from benchmarks.setting import ROOT, look_around
from dist_attn.comm.local import LocalCommunicator
from dist_attn_papers.filed import read
from dist_attn_papers.studies import longest_softmax as study
from dist_attn_papers.studies.longest_softmax import BUDGET_BYTES, HEADS, SIZE, LongestSoftmax, Row, longest_ratios
from tests.support.ranks import run_ranks

ROW = Row("all heads at once", 1, (0.0, 18_432.0, 97.0), {32: 1}, 96, 1.0, 3117, 1.0, None)


def test_tracked_memory_is_what_lives() -> None:
    """Storages count once while a tensor or a view of them lives; the peak stays."""
    with TrackedMemory() as tracked:
        x = torch.zeros(1000)
        view = x.view(10, 100)[2:]
        del x
        assert tracked.now == 4000
        y = torch.ones(500)
        del view, y
        assert tracked.now == 0
    assert tracked.peak == 6000


def test_bytes_of_the_forms_on_one_rank() -> None:
    """Inputs and outputs are all that the fused kernel holds but for its log-sum-exp; plain scores are held twice."""
    with LocalCommunicator() as comm:
        numbers, heads = 4 * HEADS * 128 * SIZE, 4 * HEADS * 128
        assert study._fused(comm, 128) in range(4 * numbers, 4 * numbers + heads + 1)
        plain, by_head = study._all_heads(comm, 128), study._head_by_head(comm, 128)
    assert plain - by_head >= 2 * (HEADS - 1) * 4 * 128 * 128
    assert plain >= 3 * numbers + 2 * HEADS * 4 * 128 * 128


@pytest.mark.slow
def test_what_a_rank_holds_in_the_reshuffle() -> None:
    """A rank's q, k and v, what it sends and what comes, each 3 L H d / P numbers, are about the most that it holds."""
    length = 1023
    peaks = run_ranks("gloo", partial(study._across, "reshuffle", length=length), 3)
    share = 4 * 3 * length * HEADS * SIZE // 3
    # The back end's own thread may let go of what was sent, to one rank or to all, a moment after it is no longer
    # needed: four at most, then.
    assert all(3.0 <= round(peak / share, 1) <= 4.0 for peak in peaks)


@pytest.mark.parametrize("coefficients", [(100.0, 12_288.0), (0.0, 18_432.0, 97.0), (5e6, 13_056.0, 9.0)])
def test_the_longest_length_is_the_last_that_fits(coefficients: tuple[float, ...]) -> None:
    """One token more does not fit into the budget."""
    polynomial = np.array(coefficients[::-1])
    longest = study.longest_within(polynomial, BUDGET_BYTES)
    assert np.polyval(polynomial, longest) <= BUDGET_BYTES < np.polyval(polynomial, longest + 1)


def test_a_study_is_filed_with_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study goes through the same door as the cases, by its name: what is filed can be read again."""
    finding = LongestSoftmax(look_around(), (ROW, Row("streamed", 1, (9.0,), {32: 9}, 64, 1.0, None, None, None)))
    studies = {"longest-softmax": Study("longest-softmax", "", study.TESTS, lambda _: finding)}
    monkeypatch.setattr(run, "why_red", lambda _: "")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert run.main(["longest-softmax"], studies) == 0
    assert "| all heads at once | 1 | 97 L² + 18,432 L | 3,117 | 1.0 | 1.0000 |  |" in capsys.readouterr().out
    (path,) = (tmp_path / "benchmarks" / "results").iterdir()
    assert json.loads(path.read_text())["rows"][0]["longest"] == 3117
    assert read(path) == finding
    assert all((ROOT / test).is_file() for test in study.TESTS)


def test_ratios_of_the_longest_sequences() -> None:
    """The best exact form over ranks counts; streamed attention only where a length was run."""
    rows: list[dict[str, Any]] = [
        {"form": "head reshuffle", "ranks": 4, "times_plain": 46.4},
        {"form": "ring", "ranks": 4, "times_plain": 52.1},
        {"form": "linear attention, streamed", "ranks": 1, "times_plain": None},
    ]
    assert longest_ratios(rows) == {"best exact / plain": 52.1}
    assert longest_ratios([*rows[:2], {**rows[2], "times_plain": 10_000.0}])["linear / plain"] == 10_000.0
