"""Scaleformer's claim about length: trained on short sequences, tested on longer ones, against absolute positions."""

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.measured import Axes, Table
from dist_attn_papers.tables.arms import of_arm, parameters_of
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.shuffled_books import (
    ShuffledBooksModel,
    ShuffledBooksRun,
    late,
    perplexity,
    shuffled_books_job,
)

__all__ = ["TRAINED_ON_SHORT"]

SEGMENT, BATCH, STEPS, PARTS = 128, 32, 300, 24
TIMES_LONGER = (1, 4, 16, 64)
LENGTHS = tuple(SEGMENT * times for times in TIMES_LONGER)
SCORED = 6 * LENGTHS[-1]
SMOKE_SEGMENT, SMOKE_BATCH = 8, 2

_KERNEL = {"kind": "scaleformer", "reach": 0}  # one relative vector for all distances: no positions
_SOFTMAX = {"kind": "softmax", "short_convolution": 0}
ARMS = {
    "scaleformer": ShuffledBooksModel({"kind": "scaleformer", "reach": 16}),
    "kernel-sinusoidal": ShuffledBooksModel(_KERNEL, "sinusoidal"),
    "softmax-sinusoidal": ShuffledBooksModel(_SOFTMAX, "sinusoidal"),
    "softmax-relative": ShuffledBooksModel({**_SOFTMAX, "relative": {"reach": 16}}),
    "kernel-none": ShuffledBooksModel(_KERNEL),
    "gated-none": ShuffledBooksModel({"kind": "rfa_gate", "short_convolution": 0, "num_random": 32}),
}
_WORDS = {
    "scaleformer": "elu + 1 kernel, relative positions (k = 16)",
    "kernel-sinusoidal": "elu + 1 kernel, sinusoidal positions",
    "softmax-sinusoidal": "softmax, sinusoidal positions",
    "softmax-relative": "softmax, relative positions (k = 16)",
    "kernel-none": "elu + 1 kernel, no positions",
    "gated-none": "random features with a gate, no positions",
}


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    segment, batch = (SMOKE_SEGMENT, SMOKE_BATCH) if budget.smoke else (SEGMENT, BATCH)
    run = ShuffledBooksRun(
        segment=segment,
        batch=batch,
        steps=budget.steps(STEPS),
        parts=budget.steps(PARTS, smoke=1),
        lengths=tuple(segment * times for times in TIMES_LONGER),
        scored=segment * TIMES_LONGER[-1] if budget.smoke else SCORED,
    )
    return [shuffled_books_job(arm, seed, model, run) for seed in seeds for arm, model in ARMS.items()]


def _report(done: Sequence[Done]) -> Report:
    steps = {one.settings["run"]["steps"] for one in done if one.settings}
    tokens = " or ".join(f"{step * BATCH * SEGMENT:,}" for step in sorted(steps))
    notes = (
        f"3 layers, width 128, trained on {tokens} tokens in rows of {SEGMENT}, each from the empty state; all arms "
        "have the same texts, batches, steps, optimiser and schedule.",
        "The same tokens of the held-out book are read in windows of every length, each from the empty state. Longer "
        "windows show more context, so a model that goes on as it was trained should pay less there.",
        "The kernel without relative positions is Scaleformer's own with a horizon of 0: what differs is positions "
        "alone.",
    )
    tables = (
        _table("Perplexity in windows of that many tokens", done, perplexity),
        _table("Perplexity of the second half of those windows", done, late),
        _claims(done),
    )
    return Report(tables, notes, (("perplexity over that at the length trained on", _draw(done)),))


def _ratios(done: Sequence[Done], arm: str, length: int) -> list[float]:
    """Of every seed: perplexity at `length` over that at the length trained on."""
    mine = [one.scores for one in done if one.arm == arm and perplexity(length) in one.scores]
    return [scores[perplexity(length)] / scores[perplexity(SEGMENT)] for scores in mine]


def _table(title: str, done: Sequence[Done], name: Callable[[int], str]) -> Table:
    columns = ["attention", "parameters"]
    columns += [f"{length:,} ({times}x)" for length, times in zip(LENGTHS, TIMES_LONGER, strict=True)]
    rows = []
    for arm in ARMS:
        cells = [_WORDS[arm], parameters_of(done, arm)]
        cells += [mean_and_spread(of_arm(done, arm, name(length))) for length in LENGTHS]
        rows.append(tuple(cells))
    return Table(title, tuple(columns), tuple(rows))


def _claims(done: Sequence[Done]) -> Table:
    rows = []
    for arm in ARMS:
        ratios = [mean_and_spread(_ratios(done, arm, length), 3) for length in LENGTHS[1:]]
        rows.append((_WORDS[arm], *ratios))
    columns = ("attention", *(f"{times}x over 1x" for times in TIMES_LONGER[1:]))
    return Table(
        "Perplexity over that at the length trained on (the paper, without numbers: relative positions generalise "
        "better to longer sequences, absolute ones are detrimental)",
        columns,
        tuple(rows),
    )


def _draw(done: Sequence[Done]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for arm in ARMS:
            found = {length: values for length in LENGTHS if (values := _ratios(done, arm, length))}
            axes.plot(list(found), [fmean(values) for values in found.values()], marker="o", label=arm)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="length of the windows", ylabel="times")
        axes.legend(fontsize=8)

    return draw


TRAINED_ON_SHORT = Experiment(
    name="scaleformer-lengths",
    question=(
        f"Scaleformer: of models trained on {SEGMENT} tokens, do those with relative positions go on at 4 and 16 times "
        "the length, and those with sinusoidal positions not?"
    ),
    tests=(
        "papers/tests/test_book_experiments.py",
        "papers/tests/test_perplexity_by_position.py",
        "papers/tests/test_relative_attention.py",
    ),
    jobs=_jobs,
    report=_report,
)
