"""The table of targets: what is judged by which number, and that every number can be reached."""

import json
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.measured import Measured, Panel, Table
from benchmarks.report import read_finding
from benchmarks.run import STUDIES
from benchmarks.setting import ROOT, look_around
from benchmarks.targets import TARGETS, Target, as_json, as_markdown, judge

ELSEWHERE = {"busy-ranks", "decode", "gpu", "longest-softmax", "prefill"}
"""Measured by `make gpu`, and by studies of `papers/`."""


def test_targets_are_met_at_their_bound() -> None:
    """A bound belongs to the good side, whichever that is; what was not measured is neither met nor missed."""
    least = Target("a", "r", "speed", "at least", 2.0)
    most = Target("a", "s", "cost", "at most", 0.05, "{:.1%}")
    assert [least.met_by(x) for x in (1.99, 2.0, 2.01)] == [False, True, True]
    assert [most.met_by(x) for x in (0.049, 0.05, 0.051)] == [True, True, False]
    assert most.needed == "at most 5.0%"
    same = Target("a", "t", "bytes", "equal to", 1.0, "{:g}x")
    assert [same.met_by(x) for x in (0.99, 1.0, 1.01)] == [False, True, False]


def test_every_target_has_a_benchmark_that_runs_by_name() -> None:
    """`dist-attn bench NAME` knows the benchmark of every target, and no ratio is judged twice."""
    assert {target.benchmark for target in TARGETS} - ELSEWHERE <= CASES.keys() | STUDIES.keys()
    assert len({(target.benchmark, target.ratio) for target in TARGETS}) == len(TARGETS)
    sizes = [(CASES[t.benchmark], int(t.ratio.rpartition(" ")[2])) for t in TARGETS if t.benchmark in CASES]
    assert all(size in case.sizes for case, size in sizes)
    assert all((ROOT / test).is_file() for study in STUDIES.values() for test in study.tests)


def test_bounds_are_written_as_they_are() -> None:
    """The form of a target's number does not round its bound."""
    for target in TARGETS:
        number = target.form.format(target.bound).rstrip("x% MiBms").replace(",", "")
        assert float(number) in (target.bound, 100 * target.bound)


def test_verdicts_for_people_and_machines() -> None:
    """Reached, missed and not measured, in words and in numbers."""
    verdicts = judge("forward", {"sdpa / ours at 512": 0.9, "sdpa / ours at 8192": 12.0})
    text = as_markdown(verdicts)
    assert "| forward against SDPA, 512 tokens | at least 1.00x | 0.90x | no |" in text
    assert "| forward against SDPA, 8,192 tokens | at least 10.00x | 12.00x | yes |" in text
    assert "| forward against the arithmetic limit | at most 1.50x | not measured |  |" in text
    by_ratio = {one["ratio"]: one["met"] for one in as_json(verdicts)}
    assert (by_ratio["sdpa / ours at 512"], by_ratio["sdpa / ours at 8192"]) == (False, True)
    assert by_ratio["ours / limit at 32768"] is None
    assert as_markdown(judge("no such benchmark", {})) == ""


def test_a_measured_study_says_and_draws_all(tmp_path: Path) -> None:
    """Tables, notes, absent peers, targets and curves of a study are in its files."""
    found = Measured(
        (Table("Times", ("length", "seconds"), (("8", "1.0"),)),),
        {"backward / forward at 8192": 3.5},
        {"seconds at 8": 1.0},
        (Panel("time", "tokens", "seconds", {"ours": {8.0: 1.0, 16.0: 2.0}}),),
        ("A note.",),
        {"peer": "it is not installed"},
        case="backward",
        question="How much?",
        setting=look_around(),
    )
    text = found.as_markdown()
    assert "| 8 | 1.0 |" in text
    assert "* A note.\n* peer was not measured: it is not installed." in text
    assert "| backward against forward | at most 3.00x | 3.50x | no |" in text
    assert '"met": false' in found.as_json()
    assert read_finding(json.loads(found.as_json())) == found
    found.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
