"""Experiments on Multi30k: their jobs are what they say, their reports stand on whatever is done, BLEU is BLEU."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError
from dist_attn.training.config import TrainingConfig
from dist_attn_papers.tables import multi30k
from dist_attn_papers.tables.arms import Claim, judge
from dist_attn_papers.tables.experiment import Budget, Done, Experiment
from dist_attn_papers.tables.multi30k import bleu_of, read_lines
from dist_attn_papers.tables.rfa_table2 import RFA_TABLE2
from dist_attn_papers.tables.scaleformer_translation import SCALEFORMER_TRANSLATION

EXPERIMENTS = (RFA_TABLE2, SCALEFORMER_TRANSLATION)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_jobs_are_told_apart_and_are_trainings(experiment: Experiment) -> None:
    """Jobs come seed by seed, with settings that are JSON and name no place on a machine, and train as they stand."""
    jobs = experiment.jobs(Budget(), (0, 1))
    assert len({job.key for job in jobs}) == len(jobs)
    trained = [job for job in jobs if "model" in job.settings]
    assert [job.seed for job in trained] == sorted(job.seed for job in trained)
    for job in trained:
        assert "/" not in json.dumps(job.settings).replace(multi30k.FOLDER, "")
        sections = {name: job.settings[name] for name in ("model", "data", "objective", "optimiser", "run")}
        data = {**sections["data"], "tokeniser": "tokeniser"}
        run = {**sections["run"], "folder": "run"}
        config = TrainingConfig.model_validate({**sections, "data": data, "run": run})
        # As many checkpoints as are averaged, all from the end of the training.
        assert config.run.keep_checkpoints * config.run.checkpoint_every <= config.run.steps / 4


def _done(experiment: Experiment, seeds: Sequence[int]) -> list[Done]:
    """Made-up numbers for every job."""
    found = []
    for number, job in enumerate(experiment.jobs(Budget(), seeds)):
        scores = {"bleu": 30.0 + number, "validation_perplexity": 5.0, "parameters": 1e6}
        if "arms" in job.settings:
            names = ("beam", "greedy")
            scores = {f"{arm}_{name}_tokens_per_second": 100.0 for arm in job.settings["arms"] for name in names}
        found.append(Done(job.arm, job.seed, scores, 60.0, dict(job.settings), "here"))
    return found


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_reports_stand_on_what_is_done(experiment: Experiment) -> None:
    """A report of everything has no gap; one of a single job, of any, is made too and says what is missing."""
    done = _done(experiment, (0, 1))
    whole = "".join(table.as_markdown() for table in experiment.report(done).tables)
    assert "not measured" not in whole and "(2)" in whole
    for one in done:
        part = "".join(table.as_markdown() for table in experiment.report([one]).tables)
        assert "not measured" in part


def test_more_may_be_better() -> None:
    """A claim about a score of which more is better is judged by the first less the second."""
    done = [Done(arm, 0, {"bleu": bleu}, 1.0, {}, "") for arm, bleu in (("good", 30.0), ("bad", 28.0))]
    row = judge(done, Claim("", "good", "bad", "bleu", more=True))
    assert row[-2:] == ("2.00 (1)", "yes (one seed)")


def test_bleu_counts_words() -> None:
    """A translation that is the reference has BLEU 100, one without a common word next to none."""
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu: pip install -e '.[dev]'")
    reference = ["A man sleeps in a green room on a couch."]
    assert bleu_of(reference, reference) == pytest.approx(100.0)
    assert bleu_of(["Nothing like it was ever seen here before"], reference) < 5


def test_missing_texts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Multi30k the file that was looked for is named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"data/multi30k/train\.de\.gz is not there"):
        read_lines("train", "de")
