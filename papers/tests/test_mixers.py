"""The comparison of mixers: equal sizes, tasks that can be solved, every kind in it, and its report."""

import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from dist_attn.models import ModelConfig, build_model
from dist_attn.training.config import TrainingConfig
from dist_attn_papers.tables.experiment import Budget, Done, Job
from dist_attn_papers.tables.mixer_arms import CAUSAL, ENCODERS, HYBRID, LAYERS_ALONE
from dist_attn_papers.tables.mixer_speed import SPEED
from dist_attn_papers.tables.mixers import MIXERS
from dist_attn_papers.tables.recall_tasks import ITEMS, NOTHING, TASKS, VOCABULARY, accuracy_at
from dist_attn_papers.tables.runner import carry_out


def _jobs(budget: Budget) -> dict[str, Job]:
    return {job.arm: job for job in MIXERS.jobs(budget, (0,))}


def test_every_model_is_timed() -> None:
    """Every kind of mixer that a model is compared with is timed as a layer alone."""
    timed = {options["kind"] for options in LAYERS_ALONE.values()}
    assert timed >= {options["kind"] for options in CAUSAL.values()}
    assert timed | {"bidirectional"} >= {options["kind"] for options in ENCODERS.values()}


def test_models_are_of_one_size() -> None:
    """All models of a task have within 2 % the parameters of that with softmax, hybrids and encoders too."""
    jobs = _jobs(Budget())
    arms = {"books": (*CAUSAL, HYBRID), "copy": (*CAUSAL, HYBRID), "listops": tuple(ENCODERS)}
    for task in arms:
        sizes = {}
        for arm in arms[task]:
            values = {"kind": "language_model", **jobs[f"{task}-{arm}"].settings["model"]}
            config = TypeAdapter(ModelConfig).validate_python(values)
            sizes[arm] = sum(parameter.numel() for parameter in build_model(config).parameters())
        assert all(abs(size / sizes["softmax"] - 1) < 0.02 for size in sizes.values()), sizes


def test_jobs_can_be_trained() -> None:
    """Settings are JSON without absolute paths, keys are unique, and ListOps' sections are training configurations."""
    jobs = MIXERS.jobs(Budget(), (0,))
    assert len({job.key for job in jobs}) == len(jobs) == 3 + 3 * (len(CAUSAL) + 1) + len(ENCODERS)
    assert all('"/' not in json.dumps(job.settings) for job in jobs)
    for job in jobs:
        if job.arm.startswith("listops-"):
            run = {**job.settings["run"], "folder": "somewhere"}
            assert TrainingConfig.model_validate({**job.settings, "run": run}).model.kind == "text_classifier"


@pytest.mark.parametrize("task", TASKS)
def test_tasks_can_be_solved(task: str) -> None:
    """What is asked stands in the sequence before the noise, once and without a doubt; a seed draws the same."""
    tokens, targets = TASKS[task](5, 20, torch.Generator().manual_seed(1))
    assert tokens.shape == targets.shape and int(tokens.max()) < VOCABULARY
    assert ((targets != NOTHING).sum(1) == ITEMS).all()
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        places = [place for place, target in enumerate(asked) if target != NOTHING]
        if task == "copy":
            assert [asked[place] for place in places] == row[:ITEMS] and len(set(row[:ITEMS])) == ITEMS
            assert row[places[1] :] == row[: ITEMS - 1]
        else:
            pairs = dict(zip(row[: 2 * ITEMS : 2], row[1 : 2 * ITEMS : 2], strict=True))
            assert len(pairs) == ITEMS and all(asked[place] == pairs[row[place]] for place in places)
    again, _ = TASKS[task](5, 20, torch.Generator().manual_seed(1))
    assert torch.equal(again, tokens)


def test_a_task_is_trained_and_asked(tmp_path: Path) -> None:
    """A job trains its model and has a share of right answers for every distance."""
    job = _jobs(Budget(smoke=True))["recall-elu"]
    done, left = carry_out(tmp_path, [job], lambda: False)
    assert not left and all(0 <= done[0].scores[accuracy_at(d)] <= 1 for d in job.settings["distances"])
    assert done[0].scores["nats"] > 0


def test_the_report() -> None:
    """What is done stands in its table, in per cent and microseconds; what is not done has no row."""
    jobs = _jobs(Budget())
    times = {f"{arm}:{what}": 2.0 for arm in LAYERS_ALONE for what in ("training", "forward", "step")}
    times |= {f"{arm}:{what}_bytes": 2048.0 for arm in LAYERS_ALONE for what in ("training", "forward")}
    scores = {
        f"{SPEED}-1024": times,
        "books-elu": {"development_bits_per_byte": 2.0, "test_bits_per_byte": 2.5, "parameters": 9e5},
        "recall-elu": {accuracy_at(d): 0.5 for d in jobs["recall-elu"].settings["distances"]},
        "listops-fnet": {"accuracy": 0.25, "parameters": 4e4},
    }
    done = [Done(arm, 0, found, 60.0, dict(jobs[arm].settings), "") for arm, found in scores.items()]
    quality, recall, listops, speed, memory = MIXERS.report(done).tables
    assert quality.rows == (("elu", "2.000 (1)", "2.500 (1)", "900,000", "1.0 (1)"),)
    assert recall.rows == (("recall", "elu", *["50 (1)"] * 4),) and listops.rows[0][1] == "25.0 (1)"
    assert speed.rows[0] == ("softmax", "1953.12", "1953.12", "2000000") and memory.rows[0][1] == "0.00"
    part = MIXERS.report(done[1:3])
    assert len(part.tables) == 2
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for _, draw in part.panels:
        draw(figure.add_subplot())
    figure.savefig(BytesIO(), format="png")
