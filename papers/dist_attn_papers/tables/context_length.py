"""Figures 2 and 3 of Unified View: quality and time of a batch of 2^14 tokens against the length it is cut into."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn.models import LanguageModel, LanguageModelConfig
from dist_attn.training.evaluation import token_loss
from dist_attn_papers.tables.arms import first_scores, of_arm
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.shuffled_books import (
    TRAINED,
    VOCAB_SIZE,
    ShuffledBooksModel,
    ShuffledBooksRun,
    perplexity,
    shuffled_books_job,
)

__all__ = ["CONTEXT_LENGTH"]

BATCH_TOKENS, STEPS, PARTS, SCORED = 1 << 14, 150, 48, 12 * 8192
SMOKE_TOKENS, SMOKE_LENGTHS = 64, (8, 32)
LENGTHS = tuple(1 << n for n in range(3, 14))
# The paper's model has softmax; linear attention is asked for whether more context then goes on to help.
MIXERS = {"softmax": LENGTHS, "linear": (32, 128, 512, 2048, 8192)}
TIMES, ROUNDS = "times", 5
PAPER_BEST = (128, 512)


def _model(mixer: str) -> ShuffledBooksModel:
    options = {
        "softmax": {"kind": "softmax", "short_convolution": 0},
        "linear": {"kind": "rfa_gate", "short_convolution": 0, "num_random": 32},
    }
    return ShuffledBooksModel(options[mixer], "sinusoidal")


def _arm(mixer: str, length: int) -> str:
    return f"{mixer}-{length}"


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    jobs = [_times_job(budget)]
    for seed in seeds:
        for mixer, lengths in MIXERS.items():
            for length in SMOKE_LENGTHS if budget.smoke else lengths:
                tokens = SMOKE_TOKENS if budget.smoke else BATCH_TOKENS
                run = ShuffledBooksRun(
                    segment=length,
                    batch=tokens // length,
                    steps=budget.steps(STEPS),
                    parts=budget.steps(PARTS, smoke=1),
                    lengths=(length,),
                    scored=2 * tokens if budget.smoke else SCORED,
                )
                jobs.append(shuffled_books_job(_arm(mixer, length), seed, _model(mixer), run))
    return jobs


def _times_job(budget: Budget) -> Job:
    """Forward and backward pass of a batch at every length, in turns, so that the machine is the same for all."""
    tokens, rounds = (SMOKE_TOKENS, 1) if budget.smoke else (BATCH_TOKENS, ROUNDS)
    lengths = {mixer: SMOKE_LENGTHS if budget.smoke else lengths for mixer, lengths in MIXERS.items()}
    models = {mixer: _model(mixer).section() for mixer in MIXERS}

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        works: dict[str, Callable[[], object]] = {}
        for mixer, section in models.items():
            model = LanguageModel(LanguageModelConfig.model_validate(section))
            works |= {_arm(mixer, length): _pass(model, tokens, length) for length in lengths[mixer]}
        watch.tell(f"{len(works)} shapes, {rounds} rounds")
        return {arm: times.fastest for arm, times in interleaved(works, rounds).items()}

    return Job(TIMES, 0, {"tokens": tokens, "rounds": rounds, "lengths": lengths, "models": models}, work)


def _pass(model: LanguageModel, tokens: int, length: int) -> Callable[[], None]:
    """A training step without its optimiser, whose time does not depend on the length."""
    drawn_BT = torch.randint(VOCAB_SIZE, (tokens // length, length), generator=torch.Generator().manual_seed(length))

    def work() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h_BTD, _ = model.hidden(drawn_BT)
            nats = token_loss(model.readout, h_BTD.flatten(0, 1), drawn_BT.flatten())
        (nats / tokens).backward()

    return work


def _report(done: Sequence[Done]) -> Report:
    seconds = first_scores(done, TIMES)
    quality = {
        mixer: {length: found for length in LENGTHS if (found := of_arm(done, _arm(mixer, length), perplexity(length)))}
        for mixer in MIXERS
    }
    notes = (
        f"Encoder-style model of 3 layers, width 128, causal, sinusoidal positions, a vocabulary of {VOCAB_SIZE:,}; "
        "the same steps, tokens, schedule and shuffled parts of fifteen books for all arms. Rows of a batch stand "
        "alone, in training and in validation: the held-out book is read in windows of the length trained on.",
        "Seconds: forward and backward pass of one batch, one thread, bfloat16, the fastest of rounds taken in turns. "
        "Softmax is torch's fused kernel; linear is random features with a gate per head.",
        "The paper trains with a vocabulary of 98K words on 103M words; tokens here are 2.5 bytes, about half a word.",
    )
    panels = (("perplexity at its own length", _draw_quality(quality)), ("seconds per batch", _draw_seconds(seconds)))
    return Report((_table(quality, done, seconds), _claims(quality, seconds)), notes, panels)


Quality = dict[str, dict[int, list[float]]]


def _table(quality: Quality, done: Sequence[Done], seconds: Scores) -> Table:
    columns = ["length", "rows"]
    for mixer in MIXERS:
        columns += [f"{mixer}: perplexity", "in training", "seconds per batch"]
    rows = []
    for length in LENGTHS:
        cells = [f"{length:,}", f"{BATCH_TOKENS // length:,}"]
        for mixer, lengths in MIXERS.items():
            if length not in lengths:
                cells += [""] * 3
                continue
            cells.append(mean_and_spread(quality[mixer].get(length, [])))
            cells.append(mean_and_spread(of_arm(done, _arm(mixer, length), TRAINED)))
            arm = _arm(mixer, length)
            cells.append(f"{seconds[arm]:.3f}" if arm in seconds else "not measured")
        rows.append(tuple(cells))
    return Table("Perplexity of the held-out book and time of a batch of 16,384 tokens", tuple(columns), tuple(rows))


def _claims(quality: Quality, seconds: Scores) -> Table:
    best = {mixer: _best(found) for mixer, found in quality.items()}
    low, high = PAPER_BEST
    falls = _fall(seconds)
    rows = (
        ("softmax is best at a length of", f"{low} to {high}", _words(best["softmax"])),
        ("linear attention is best at a length of", "not asked", _words(best["linear"])),
        ("time of a batch, length 512 over length 8", "below 1", falls(8, 512)),
        ("time of a batch, length 8,192 over length 512", "below 1", falls(512, 8192)),
    )
    return Table("The paper's claims", ("claim", "paper", "here"), rows)


def _best(found: dict[int, list[float]]) -> int | None:
    """The length of the lowest mean; None before there are two to choose from."""
    return min(found, key=lambda length: sum(found[length]) / len(found[length])) if len(found) > 1 else None


def _words(length: int | None) -> str:
    return "not measured" if length is None else f"{length:,}"


def _fall(seconds: Scores) -> Callable[[int, int], str]:
    def ratio(short: int, long: int) -> str:
        arms = _arm("softmax", short), _arm("softmax", long)
        if any(arm not in seconds for arm in arms):
            return "not measured"
        return f"{seconds[arms[1]] / seconds[arms[0]]:.2f}"

    return ratio


def _draw_quality(quality: Quality) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for mixer, found in quality.items():
            axes.plot(list(found), [sum(v) / len(v) for v in found.values()], marker="o", label=mixer)
        axes.axvspan(*PAPER_BEST, alpha=0.1, color="black", label="best in the paper")
        axes.set(xscale="log", xlabel="length", ylabel="perplexity")
        axes.legend(fontsize=8)

    return draw


def _draw_seconds(seconds: Scores) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for mixer, lengths in MIXERS.items():
            known = [length for length in lengths if _arm(mixer, length) in seconds]
            axes.plot(known, [seconds[_arm(mixer, length)] for length in known], marker="o", label=mixer)
        axes.set(xscale="log", xlabel="length", ylabel="seconds")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)

    return draw


CONTEXT_LENGTH = Experiment(
    name="uv-context",
    question=(
        "A Unified View of Long-Sequence Models, Figures 2 and 3: at 2^14 tokens per batch, into rows of which length "
        "are they best cut, and does the time of a batch fall with the length?"
    ),
    tests=("tests/training/test_loop.py", "papers/tests/test_book_experiments.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)
