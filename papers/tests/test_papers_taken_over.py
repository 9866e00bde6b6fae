"""Experiments that begin with results that were filed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError
from dist_attn_papers.tables.experiment import Done, Job, Scores, Watch, read_done
from dist_attn_papers.tables.runner import take_over


def _work(folder: Path, watch: Watch) -> Scores:
    raise AssertionError("nothing is done here")


def _filed(path: Path, done: Sequence[Done]) -> Path:
    path.write_text(json.dumps({"numbers": [asdict(one) for one in done]}))
    return path


def _done(arm: str, settings: dict[str, int]) -> Done:
    return Done(arm, 0, {"bleu": 30.5}, 12.5, settings, "a machine, a day")


def test_a_filed_result_stands_for_its_job(tmp_path: Path) -> None:
    """A job of the same arm, seed and settings has its numbers from the file, and is done."""
    jobs = [Job("elu", 0, {"steps": 600}, _work), Job("elu", 1, {"steps": 600}, _work)]
    filed = _filed(tmp_path / "filed.json", [_done("elu", {"steps": 600})])
    assert take_over(tmp_path / "runs", jobs, filed) == jobs[:1]
    assert read_done(tmp_path / "runs", jobs[0]) == _done("elu", {"steps": 600})
    assert read_done(tmp_path / "runs", jobs[1]) is None


def test_other_settings_are_not_taken(tmp_path: Path) -> None:
    """What was found under other settings is of another job."""
    filed = _filed(tmp_path / "filed.json", [_done("elu", {"steps": 800})])
    assert not take_over(tmp_path / "runs", [Job("elu", 0, {"steps": 600}, _work)], filed)


def test_a_job_whose_model_is_wanted_is_not_taken(tmp_path: Path) -> None:
    """Numbers do not stand for a job that another one, which is still to be done, needs the model of."""
    first, second = Job("first", 0, {}, _work), Job("second", 0, {}, _work, needs=("first/seed-0",))
    third = Job("third", 0, {}, _work, needs=("second/seed-0",))
    filed = _filed(tmp_path / "filed.json", [_done("first", {}), _done("second", {})])
    assert not take_over(tmp_path / "runs", [first, second, third], filed)
    assert take_over(tmp_path / "runs", [first, second], filed) == [first, second]


@pytest.mark.parametrize("text", ["", "[]", '{"numbers": 3}', '{"numbers": [{"arm": "elu"}]}'])
def test_a_file_that_is_no_filed_experiment_is_refused(tmp_path: Path, text: str) -> None:
    """The words name the file and what is wanted."""
    (tmp_path / "filed.json").write_text(text)
    with pytest.raises(ConfigError, match=r"filed\.json is no .* give"):
        take_over(tmp_path / "runs", [], tmp_path / "filed.json")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """So is one that is not there."""
    with pytest.raises(ConfigError, match="cannot be read"):
        take_over(tmp_path / "runs", [], tmp_path / "filed.json")
