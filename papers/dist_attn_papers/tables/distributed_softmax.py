"""Figure 6 of Unified View: length and time of exact attention over ranks, against one device with and without a loop.

The paper compares with an implementation that holds the scores of all heads. A device that takes the heads one by one,
as each of its ranks does, is the baseline that it leaves out; `longest_softmax` finds the lengths.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.measured import Axes, Table
from dist_attn.comm import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import softmax_attention
from dist_attn.ops.softmax_attention import softmax_attention_naive
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.studies import longest_softmax
from dist_attn_papers.studies.longest_softmax import HEADS, RANKS, SIZE, head_by_head
from dist_attn_papers.tables.arms import first_scores
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report

__all__ = ["DISTRIBUTED_SOFTMAX", "fit_linear_and_square", "seconds_of"]

WIDTH = HEADS * SIZE
LONGEST, ROUNDS, TIMEOUT_S = "longest", 3, 600.0
UP_TO = {
    "all-heads": 2048,
    "head-by-head": 8192,
    "fused": 16_384,
    "reshuffle": 16_384,
    "ring": 16_384,
}
OVER_RANKS = ("reshuffle", "ring")
_WORDS = {
    "all-heads": "all heads at once, 1 rank (the paper's baseline)",
    "head-by-head": "one head after the other, 1 rank",
    "fused": "fused kernel, 1 rank",
    "reshuffle": f"head reshuffle, {RANKS} ranks (the paper's algorithm)",
    "ring": f"ring, {RANKS} ranks",
}
# As `longest_softmax` calls the same forms.
_ROWS = {
    "all-heads": ("all heads at once", 1),
    "head-by-head": ("one head after the other", 1),
    "fused": ("fused kernel", 1),
    "reshuffle": ("head reshuffle", RANKS),
    "ring": ("ring", RANKS),
}

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _jobs(budget: Budget, _: Sequence[int]) -> list[Job]:
    rounds = 1 if budget.smoke else ROUNDS
    jobs = []
    for form, most in UP_TO.items():
        lengths = (64, 128) if budget.smoke else tuple(1 << n for n in range(8, 15) if 1 << n <= most)
        jobs.append(_times_job(form, lengths, rounds))

    def longest(folder: Path, watch: Watch) -> Scores:
        found = {(row.form, row.ranks): row.longest for row in longest_softmax.measure(budget.smoke).rows}
        return {form: float(found[row] or 0) for form, row in _ROWS.items()}

    settings = {"budget_bytes": longest_softmax.BUDGET_BYTES, "smoke": budget.smoke}
    return [*jobs, Job(LONGEST, 0, settings, longest)]


def _times_job(form: str, lengths: tuple[int, ...], rounds: int) -> Job:
    settings = {"form": form, "lengths": lengths, "rounds": rounds, "width": WIDTH, "heads": HEADS, "ranks": RANKS}

    def work(folder: Path, watch: Watch) -> Scores:
        taken = _over_ranks(form, lengths, rounds) if form in OVER_RANKS else _on_one(form, lengths, rounds)
        return {f"seconds_at_{length}": seconds for length, seconds in zip(lengths, taken, strict=True)}

    return Job(form, 0, settings, work)


def _on_one(form: str, lengths: Sequence[int], rounds: int) -> list[float]:
    torch.set_num_threads(1)
    with LocalCommunicator() as comm:
        return [seconds_of(form, comm, length, rounds) for length in lengths]


def _over_ranks(form: str, lengths: Sequence[int], rounds: int) -> list[float]:
    """Of the slowest rank; ranks are processes over gloo that live for all lengths."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(RANKS) as pool:
        store = (Path(folder) / "store").as_uri()
        of_ranks = pool.starmap(_rank_main, [(r, store, form, lengths, rounds) for r in range(RANKS)], chunksize=1)
    return [max(taken) for taken in zip(*of_ranks, strict=True)]


def _rank_main(rank: int, store: str, form: str, lengths: Sequence[int], rounds: int) -> list[float]:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    with TorchDistCommunicator.connect(
        "gloo", timeout_s=TIMEOUT_S, device=cpu, meeting=store, rank=rank, size=RANKS
    ) as comm:
        return [seconds_of(form, comm, length, rounds) for length in lengths]


def seconds_of(form: str, comm: Communicator, length: int, rounds: int) -> float:
    """The fastest of some rounds of a whole layer of attention on this rank: projections, attention, projection."""
    layout = SequenceLayout.even(length, comm.size)
    attend, own = _attend(form, comm, layout), layout.lengths[comm.rank]
    generator = torch.Generator().manual_seed(length + comm.rank)
    x_LD = torch.randn(own, WIDTH, generator=generator)
    inward, outward = torch.randn(WIDTH, 3 * WIDTH) / WIDTH**0.5, torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    taken = []
    with torch.inference_mode():
        for number in range(rounds + 1):
            started = time.perf_counter()
            q_BHLK, k_BHLK, v_BHLV = (x_LD @ inward).view(1, own, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).contiguous()
            z_BHLV = attend(q_BHLK, k_BHLK, v_BHLV)
            z_BHLV.transpose(1, 2).reshape(own, WIDTH) @ outward
            if number:
                taken.append(time.perf_counter() - started)
    return min(taken)


def _attend(form: str, comm: Communicator, layout: SequenceLayout) -> Attend:
    if form == "all-heads":
        return lambda q, k, v: softmax_attention_naive(q, k, v, causal=True)
    if form == "head-by-head":
        return head_by_head
    if form == "fused":
        return lambda q, k, v: softmax_attention(q, k, v, causal=True)
    ops = ShardedSequenceOps(comm, layout, softmax="ring" if form == "ring" else "reshuffle")
    return lambda q, k, v: ops.softmax_attention(q, k, v, causal=True)


def fit_linear_and_square(seconds: dict[int, float]) -> tuple[float, float]:
    """(a, b) of T = a L + b L^2 with the least relative errors; neither below 0.

    Units: seconds by length.
    """
    lengths, taken = np.array(list(seconds), dtype=np.float64), np.array(list(seconds.values()))
    columns = np.stack([lengths / taken, lengths**2 / taken], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(lengths)), rcond=None)
    if a < 0 or b < 0:
        # One term alone, the one that misses less.
        alone = [column.sum() / (column @ column) for column in columns.T]
        errors = [np.square(1 - share * column).sum() for share, column in zip(alone, columns.T, strict=True)]
        a, b = (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])
    return float(a), float(b)


def _seconds(done: Sequence[Done]) -> dict[str, dict[int, float]]:
    return {
        one.arm: {int(name.rpartition("_")[2]): value for name, value in one.scores.items()}
        for one in done
        if one.arm in UP_TO
    }


def _report(done: Sequence[Done]) -> Report:
    seconds = _seconds(done)
    longest = first_scores(done, LONGEST)
    notes = (
        f"A layer of width {WIDTH}, {HEADS} heads of {SIZE}, float32, causal, forward, projections included; the "
        "fastest of three. Ranks are processes over gloo, one thread each; where they are more than the cores, seconds "
        "say nothing about what so many devices would gain.",
        "The paper's forms hold the full scores of a head; the reshuffle here ends in torch's fused kernel, which does "
        "not. Longest: within 1 GB of tracked tensors per rank, as in the study `longest-softmax`.",
    )
    return Report((_times(seconds), _fits(seconds, longest)), notes, (("seconds per layer", _draw(seconds)),))


def _times(seconds: dict[str, dict[int, float]]) -> Table:
    lengths = sorted({length for found in seconds.values() for length in found})
    rows = []
    for form, words in _WORDS.items():
        found = seconds.get(form, {})
        rows.append((words, *(f"{found[length]:.3f}" if length in found else "–" for length in lengths)))
    return Table("Seconds by length", ("form", *(f"{length:,}" for length in lengths)), tuple(rows))


def _fits(seconds: dict[str, dict[int, float]], longest: Scores) -> Table:
    plain, rows = longest.get("all-heads"), []
    for form, words in _WORDS.items():
        cells = ["not measured"] * 3
        if len(found := seconds.get(form, {})) > 1:
            a, b = fit_linear_and_square(found)
            (shorter, before), (longer, after) = sorted(found.items())[-2:]
            slope = np.log(after / before) / np.log(longer / shorter)
            cells = [f"{1e6 * a:.2f} L + {1e6 * b:.6f} L²", f"{a / b:,.0f}" if b else "none", f"{slope:.2f}"]
        reach = longest.get(form)
        cells.append(f"{reach:,.0f}" if reach else "not measured")
        cells.append(f"{reach / plain:.1f}" if reach and plain else "not measured")
        rows.append((words, *cells))
    columns = ("form", "microseconds", "the square is more from", "last slope", "longest", "times plain (paper: 40)")
    return Table("T = a L + b L², and the longest sequence", columns, tuple(rows))


def _draw(seconds: dict[str, dict[int, float]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for form, found in seconds.items():
            axes.loglog(list(found), list(found.values()), marker="o", label=form)
        axes.set(xlabel="length", ylabel="seconds")
        axes.legend(fontsize=8)

    return draw


DISTRIBUTED_SOFTMAX = Experiment(
    name="uv-distributed",
    question=(
        "A Unified View of Long-Sequence Models, Figure 6: how long a sequence does exact attention over ranks reach, "
        "and how does its time grow, against one device that takes all heads at once and one that takes them in turn?"
    ),
    tests=(*longest_softmax.TESTS, "papers/tests/test_paper_times.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)
