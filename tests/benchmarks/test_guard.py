"""The guard against lost speed, on made-up results: what is compared with what, and when it fails."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guard
from benchmarks.cases import CASES
from benchmarks.guard import QUICK, Comparison, Watched, better, compare, filed_results, latest, measure_now, table
from benchmarks.setting import Setting

FASTER = Watched("forward", "sdpa / ours at 8192", "higher")
CLOSER = Watched("forward", "ours / limit at 8192", "lower")
HERE = Setting("2026-11-22T10:00:00+00:00", "abc", "This CPU", 2, 2, 0.1, {})


def _filed(folder: Path, name: str, values: dict[str, Any], **setting: Any) -> None:
    merged = asdict(replace(HERE, **setting))
    (folder / f"{name}.json").write_text(json.dumps({"object": "benchmark", "setting": merged, **values}))


@pytest.mark.parametrize(
    ("watched", "filed", "now", "loss", "failed"),
    [
        (FASTER, 10.0, 8.6, 0.14, False),
        (FASTER, 10.0, 8.4, 0.16, True),
        (FASTER, 10.0, 20.0, -1.0, False),
        (CLOSER, 2.0, 2.3, 0.1304, False),
        (CLOSER, 2.0, 2.4, 0.1667, True),
        (CLOSER, 2.0, 1.0, -1.0, False),
    ],
)
def test_a_loss_is_told_from_a_gain(watched: Watched, filed: float, now: float, loss: float, failed: bool) -> None:
    """Higher ratios are better or lower ones, as the ratio says; a loss fails above 15 %, a gain never."""
    found = Comparison(watched, filed, now)
    assert found.loss == pytest.approx(loss, abs=1e-4)
    assert found.failed() is failed


def test_what_cannot_be_compared() -> None:
    """Nothing filed is no failure; a filed ratio that is not measured any more is one."""
    assert not Comparison(FASTER, None, 9.0).failed()
    assert Comparison(FASTER, 9.0, None).failed()
    text = table([Comparison(FASTER, None, 9.0), Comparison(FASTER, 9.0, None), Comparison(CLOSER, 1.0, 1.5)])
    assert [line.split("|")[-2].strip() for line in text.splitlines()[2:]] == [
        "not filed for this machine",
        "GONE",
        "LOST",
    ]
    assert "| 1.00 | 1.50 | -33.3% |" in text


def test_what_is_measured_again_counts_where_it_is_better() -> None:
    """Of ratios that looked lost the better of two counts, whichever way is better; all others stay the first."""
    first = {"forward": {FASTER.ratio: 8.0, CLOSER.ratio: 1.5, "else": 3.0}}
    second = {"forward": {FASTER.ratio: 9.5, CLOSER.ratio: 1.2, "else": 4.0}}
    assert better([FASTER, CLOSER], first, second) == {"forward": {FASTER.ratio: 9.5, CLOSER.ratio: 1.2, "else": 3.0}}
    assert better([FASTER, CLOSER], second, first)["forward"] == second["forward"]
    assert better([FASTER], first, {}) == first


def test_the_newest_result_of_this_machine_counts(tmp_path: Path) -> None:
    """Results of another machine or number of threads are passed over, and older ones, and files of other kinds."""
    ratio = FASTER.ratio
    _filed(tmp_path, "a", {"case": "forward", "ratios": {ratio: 5.0}}, date="2026-11-20")
    _filed(tmp_path, "b", {"case": "forward", "ratios": {ratio: 6.0}}, date="2026-11-21")
    _filed(tmp_path, "c", {"case": "forward", "ratios": {ratio: 7.0}}, date="2026-11-22", threads=1)
    _filed(tmp_path, "d", {"case": "forward", "ratios": {ratio: 8.0}}, date="2026-11-22", machine="Another CPU")
    (tmp_path / "e.json").write_text("not JSON")
    (tmp_path / "f.json").write_text("[]")
    filed = filed_results(tmp_path)
    (found,) = compare([FASTER], filed, {"forward": {ratio: 4.0}}, HERE)
    assert (found.filed, found.now) == (6.0, 4.0)
    newest = latest(filed, "forward")
    assert newest is not None
    assert newest["file"] in ("c.json", "d.json")
    assert latest(filed, "backward") is None


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when nothing was lost, 1 when something was or tests are red, 2 when nothing was filed here."""
    monkeypatch.setattr(guard, "ROOT", tmp_path)
    monkeypatch.setattr(guard, "RESULTS", Path())
    monkeypatch.setattr(guard, "QUICK", (FASTER,))
    monkeypatch.setattr(guard, "look_around", lambda: HERE)
    monkeypatch.setattr(guard, "why_red", lambda _: "")
    monkeypatch.setattr(guard, "measure_now", lambda *_: {"forward": {FASTER.ratio: 8.0}})
    assert guard.main([]) == 2
    assert 'make bench ARGS="forward"' in capsys.readouterr().err
    _filed(tmp_path, "a", {"case": "forward", "ratios": {FASTER.ratio: 9.0}})
    assert guard.main([]) == 0
    assert guard.main(["--most-loss", "0.1"]) == 1
    said = capsys.readouterr().err
    assert "forward: sdpa / ours at 8192" in said
    assert "quiet machine" not in said
    monkeypatch.setattr(guard, "look_around", lambda: replace(HERE, load_average=7.5))
    assert guard.main([]) == 0
    assert "the load is 7.5 on 2 cores" in capsys.readouterr().err
    monkeypatch.setattr(guard, "why_red", lambda _: "pytest ended with code 1")
    assert guard.main([]) == 1


def test_every_watched_ratio_is_one_that_is_measured() -> None:
    """The cases that are watched have the sizes, and give ratios of the names, that are watched."""
    assert all(int(one.ratio.rpartition(" ")[2]) in CASES[one.case].sizes for one in QUICK)
    kinds = {one.case.partition("-")[0]: one for one in QUICK}.values()
    small = [replace(one, ratio=f"{one.ratio.rpartition(' ')[0]} 16") for one in kinds]
    found = measure_now(small, 1)
    assert all(found[one.case][one.ratio] > 0 for one in small)
