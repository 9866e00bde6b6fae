"""The million-scale model as ranks grow: real ranks are measured, and what is measured is reported."""

from pathlib import Path

import pytest

from dist_attn_research.papers.experiment import Budget, Done
from dist_attn_research.papers.million_scaling import MILLION_SCALING, RANKS


class _Watch:
    """Hears what a job tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stop(self) -> bool:
        return False

    def tell(self, line: str) -> None:
        self.lines.append(line)


def test_two_real_ranks_are_measured(tmp_path: Path) -> None:
    """A step over two processes keeps its limit of tokens, sends bytes and takes time."""
    job = next(job for job in MILLION_SCALING.jobs(Budget(smoke=True), (0,)) if job.arm == "paper-2")
    watch = _Watch()
    scores = job.work(tmp_path, watch)
    assert scores["kept_most"] == 64 and scores["sent_most"] > 0 and scores["cpu_seconds_most"] > 0
    assert scores["cpu_seconds_all"] >= scores["cpu_seconds_most"] and watch.lines


def test_an_expert_comes_with_every_rank() -> None:
    """Tokens, kept tokens and experts of the paper's arm grow with ranks; the other has one expert throughout."""
    plans = {job.arm: job.settings for job in MILLION_SCALING.jobs(Budget(), (0, 1))}
    assert [plans[f"paper-{ranks}"]["experts"] for ranks in RANKS] == list(RANKS)
    assert {plans[f"single-{ranks}"]["experts"] for ranks in RANKS} == {1}
    assert len(plans) == 2 * len(RANKS)


def test_growth_is_told_against_one_rank() -> None:
    """Time per token of all ranks over that of one; nothing where one rank is not measured yet."""
    jobs = {job.arm: job for job in MILLION_SCALING.jobs(Budget(), (0,))}
    scores = {"cpu_seconds_most": 1.0, "cpu_seconds_all": 3.0, "sent_most": 5.0, "kept_most": 9.0, "dropped_most": 0.1}
    done = [Done(arm, 0, scores, 1.0, dict(jobs[arm].settings), "") for arm in ("paper-1", "paper-2", "single-4")]
    (table,) = MILLION_SCALING.report(done).tables
    assert [row[6] for row in table.rows] == ["1.00", "0.50", ""]
    figure = pytest.importorskip("matplotlib.figure").Figure()
    MILLION_SCALING.report(done).panels[0][1](figure.add_subplot())
    assert len(figure.axes[0].lines) == 2
