"""The experiment on needles: both models learn from the same sequences, and the report shows what was found."""

from pathlib import Path

import pytest

from dist_attn.training.config import TrainingConfig
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.needles import DENSE, NEEDLES, SPARSE, STAGES
from dist_attn_papers.tables.selector_collapse import ARMS, SELECTOR_COLLAPSE


def test_both_models_read_the_same_sequences_in_the_same_steps(tmp_path: Path) -> None:
    """Data, optimiser and steps of the two differ in no stage, and every stage is a training that is accepted."""
    jobs = {(job.arm, job.seed): job for job in NEEDLES.jobs(Budget(), (0, 1))}
    for seed in (0, 1):
        pairs = zip(*(jobs[arm, seed].settings["stages"] for arm in (SPARSE, DENSE)), strict=True)
        for sparse, dense in pairs:
            assert sparse["data"] == dense["data"] and sparse["optimiser"] == dense["optimiser"]
            assert sparse["run"]["steps"] == dense["run"]["steps"]
            for values in (sparse, dense):
                TrainingConfig.model_validate({**values, "run": {**values["run"], "folder": tmp_path}})
    seeds = {stage["data"]["seed"] for job in jobs.values() for stage in job.settings["stages"] if job.arm == SPARSE}
    assert len(seeds) == 2 * len(STAGES)


def test_the_report_has_a_line_for_every_length() -> None:
    """Means over seeds stand beside what a step takes and what is kept; what is not there yet is said to be missing."""
    found = {"accuracy_32": 1.0, "kept_32": 0.25, "dropped_32": 0.0, "kept_at_step_4": 0.5}
    done = [Done(SPARSE, seed, found | {"accuracy_32": 1.0 - 0.5 * seed}, 1.0, {}, "") for seed in (0, 1)]
    (table,) = NEEDLES.report(done).tables
    assert table.rows == (
        ("32", "0.750 ± 0.354 (2)", "not measured", "not measured", "not measured", "0.25000 ± 0.00000 (2)",
         "0.00000 ± 0.00000 (2)"),
    )  # fmt: skip


def test_the_figure_is_drawn() -> None:
    """Both panels draw what there is."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    done = [Done(DENSE, 0, {"accuracy_32": 0.3}, 1.0, {}, ""), Done(SPARSE, 0, {"kept_at_step_9": 0.1}, 1.0, {}, "")]
    for _, draw in NEEDLES.report(done).panels:
        draw(figure.add_subplot())
    assert [len(axes.lines) for axes in figure.axes] == [3, 1 + len(STAGES)]


def test_arms_of_the_collapse_differ_in_what_the_selector_learns_for(tmp_path: Path) -> None:
    """All stages are trainings that are accepted; the first is the same for all arms, sequences are in every stage."""
    jobs = SELECTOR_COLLAPSE.jobs(Budget(), (0,))
    assert {job.arm for job in jobs} == set(ARMS)
    assert len({str(job.settings["stages"][0]) for job in jobs}) == 1
    assert len({str(stage["data"]) for job in jobs for stage in job.settings["stages"]}) == 3
    assert len({str(job.settings["stages"][1]["model"]) for job in jobs}) == len(ARMS)
    for job in jobs:
        for stage in job.settings["stages"]:
            TrainingConfig.model_validate({**stage, "run": {**stage["run"], "folder": tmp_path}})
            assert stage["run"]["steps"] % stage["run"]["evaluate_every"] == 0


def test_the_collapse_is_reported_by_stage() -> None:
    """Shares and accuracies at the ends of the stages, mean over seeds; an arm that is missing says so."""
    (job,) = (job for job in SELECTOR_COLLAPSE.jobs(Budget(), (0,)) if job.arm == "adversarial")
    ends = (480, 880, 1200)
    scores = {f"kept_at_step_{end}": 1.0 / (1 + at) for at, end in enumerate(ends)}
    scores |= {f"accuracy_at_step_{end}": 0.9 for end in ends} | {"accuracy_32": 0.9}
    done = [Done("adversarial", seed, scores, 1.0, dict(job.settings), "") for seed in (0, 1)]
    (table,) = SELECTOR_COLLAPSE.report(done).tables
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Eq. 28, with the rate term"][:3] == ("100.0 ± 0.0 (2)", "50.0 ± 0.0 (2)", "33.3 ± 0.0 (2)")
    assert rows["Eq. 27, with the rate term"][0] == "not measured"
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for _, draw in SELECTOR_COLLAPSE.report(done).panels:
        draw(figure.add_subplot())
    assert all(axes.lines for axes in figure.axes)
