"""The proof over a million tokens: which layers there are, what is measured of each, and what is reported."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError
from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.million_layers import ARMS, WIDTH, formula_bytes
from dist_attn_papers.tables.million_run import Plan, Reading, first_bytes, read_in_blocks, read_slice, read_whole
from dist_attn_papers.tables.million_scaling import MILLION_SCALING
from dist_attn_papers.tables.million_scaling import RANKS as SCALED_RANKS
from dist_attn_papers.tables.million_tokens import MILLION_TOKENS, RANKS, TOKENS, growth
from tests.support.ranks import run_ranks

LENGTHS = (66, 132)
# One of each way to exchange; the contract of mixers holds all of them over ranks.
WAYS = ("rfa_gate", "s4d", "convolution-centred", "bidirectional-elu", "fnet", "mlp_mixer", "million")


def _text(length: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)


def _read(comm: Communicator, plan: Plan, length: int) -> Reading:
    reading = read_slice(comm, plan, _text(length))
    return read_in_blocks(comm, plan, _text(length), reading) if ARMS[plan.name].streams else reading


@pytest.mark.parametrize("name", WAYS)
def test_ranks_find_what_one_rank_finds(name: str, tmp_path: Path) -> None:
    """Over three ranks, whole and in uneven blocks, outputs are those of one; bytes are the formula's, and where a
    state is carried the same at both lengths.
    """
    plan = Plan(name, LENGTHS, 3, 50, 0, tmp_path / "outputs")
    alone = [read_whole(plan, _text(length)) for length in LENGTHS]
    assert plan.outputs.stat().st_size == 4 * WIDTH * LENGTHS[-1]
    found = []
    for length in LENGTHS:
        one, *others = run_simulated(partial(_read, plan=plan, length=length), 3, timeout_s=60.0)
        for other in others:
            one = one.largest_of(other)
        found.append(one)
    assert found[-1].largest > 0.01
    assert found[-1].difference <= 1e-5 * found[-1].largest
    assert found[-1].streamed_difference <= 1e-5 * found[-1].largest
    assert (found[0].sent == found[1].sent) == ARMS[name].carries
    assert all(formula_bytes(name, n, 3) in (None, one.sent) for n, one in zip(LENGTHS, found, strict=True))
    assert found[1].peak > 0 and alone[0].peak < alone[1].peak


def test_processes_find_what_threads_find(tmp_path: Path) -> None:
    """Over gloo the same numbers are sent, and outputs agree with one rank's."""
    plan = Plan("elu", (132,), 2, 100, 0, tmp_path / "outputs")
    read_whole(plan, _text(132))
    read = partial(_read, plan=plan, length=132)
    processes, threads = run_ranks("gloo", read, 2), run_simulated(read, 2, timeout_s=60.0)
    assert [one.sent for one in processes] == [one.sent for one in threads]
    assert all(one.difference <= 1e-5 and one.streamed_difference <= 1e-5 for one in processes)


def test_the_first_bytes_of_the_books(tmp_path: Path) -> None:
    """Books follow each other by name; too few bytes are said to be so."""
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    assert first_bytes(tmp_path, 9).tobytes() == b"first sec"
    with pytest.raises(ConfigError, match="books of 12 bytes; 13"):
        first_bytes(tmp_path, 13)


def test_the_jobs_read_a_million_tokens() -> None:
    """Each kind reads a quarter, a half and all of 1,048,576 tokens, but for what memory does not allow."""
    jobs = {job.arm: job.settings for job in MILLION_TOKENS.jobs(Budget(), (0,))}
    assert jobs.keys() == ARMS.keys() and TOKENS == 1_048_576
    assert {name for name, settings in jobs.items() if max(settings["lengths"]) != TOKENS} == {"s4-convolution"}
    assert all(settings["lengths"][0] * 4 == settings["lengths"][2] for settings in jobs.values())


def test_the_report() -> None:
    """Growth is an exponent, or flat where nothing grows; what does not stream has no numbers of blocks."""
    assert growth({1024: 3.0, 2048: 6.0, 4096: 12.0}) == pytest.approx(1.0)
    done = []
    for job in MILLION_TOKENS.jobs(Budget(), (0,)):
        scores: dict[str, float] = {}
        for length in job.settings["lengths"]:
            sent = 96 if ARMS[job.arm].carries else 2 * length
            reading = Reading(1e-6 * length, 40 * length, sent, sent, 1e-7, 2.0, 1.0, 9 << 20, 96, 1e-7)
            for where in ("one", "ranks"):
                scores |= {f"{where}:{what}:{length}": value for what, value in vars(reading).items()}
        done.append(Done(job.arm, 0, scores, 1.0, dict(job.settings), ""))
    sent, memory, times = MILLION_TOKENS.report(done).tables
    assert {row[5] for row in sent.rows} == {"flat", "L^1.00"} and len(sent.rows) == len(ARMS)
    by_name = {row[0]: row for row in memory.rows}
    assert by_name["rfa"][8] == "flat" and by_name["fnet"][5:] == ("",) * (len(memory.columns) - 5)
    assert all(row[5] == "1.00" for row in times.rows) and f"{RANKS} ranks" in " ".join(times.columns)


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
    assert [plans[f"paper-{ranks}"]["experts"] for ranks in SCALED_RANKS] == list(SCALED_RANKS)
    assert {plans[f"single-{ranks}"]["experts"] for ranks in SCALED_RANKS} == {1}
    assert len(plans) == 2 * len(SCALED_RANKS)


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
