"""Sec. 10 of Unified View, proposed there and not measured: a sparse model and a dense one on needles in noise.

Both go through the same lengths: what is learnt on short sequences is learnt on at each longer one, up to 65,536 tokens
of which eight matter. The Selector keeps everything at first and learns to drop once the classifier knows something.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn_papers.made_up import Needles
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.model import MillionModel
from dist_attn_papers.tables.arms import first_scores, of_arm
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.needle_training import COPIES, NOISE, SYMBOLS, Stage, needles_job, needles_run

__all__ = ["MODELS", "NEEDLES", "SPARSE"]

SIZE, HEADS, MLP = 32, 2, 64
HELD_OUT, SMOKE_HELD_OUT = 200, 3
TIMES, ROUNDS = "times", 3
SPARSE, DENSE = "sparse", "dense"
SIZES = {"vocab_size": NOISE + 2 * SYMBOLS, "num_classes": 2 * SYMBOLS - 1}
MODELS: dict[str, dict[str, Any]] = {
    SPARSE: {
        "kind": "million",
        **SIZES,
        "hidden_size": SIZE,
        "num_heads": HEADS,
        "mlp_size": MLP,
        "positions": "none",
        "selector": {
            "gate": "straight_through",
            "most_tokens": 512,
            "temperature": 0.3,
            "initial_logit": 4.0,
        },
        "router": {"num_experts": 2, "capacity_factor": 2.0},
    },
    DENSE: {
        "kind": "text_classifier",
        **SIZES,
        "encoder": {
            "hidden_size": SIZE,
            "num_layers": 1,
            "mlp_size": MLP,
            "mixer": {
                "kind": "bidirectional",
                "attention": "rfa",
                "hidden_size": SIZE,
                "num_heads": HEADS,
                "num_random": 16,
            },
            "positions": "none",
        },
    },
}


STAGES: tuple[Stage, ...] = (
    # Rates are somewhat above the share of needles, so that a symbol that was dropped is let in again. The term is a
    # square of shares, which shrink with the length: so its weight grows.
    Stage(32, 8, 600, 1e-2, {"frozen": True}),
    Stage(32, 16, 600, 3e-3, {"rate": 0.3, "rate_weight": 1.0}),
    Stage(256, 16, 300, 3e-3, {"rate": 0.045, "rate_weight": 10.0}),
    Stage(2048, 8, 200, 3e-3, {"rate": 0.006, "rate_weight": 100.0}),
    Stage(65_536, 2, 24, 1e-3, {"rate": 0.0002, "rate_weight": 10_000.0}),
)
SMOKE_STAGES: tuple[Stage, ...] = (Stage(16, 2, 2, 1e-2, {"frozen": True}), Stage(64, 2, 2, 1e-3))


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    stages = SMOKE_STAGES if budget.smoke else STAGES
    stages = tuple(Stage(s.length, s.batch, budget.steps(s.steps), s.learning_rate, s.selector) for s in stages)
    held_out = SMOKE_HELD_OUT if budget.smoke else HELD_OUT
    curricula = [_curriculum(arm, seed, stages, held_out) for arm in MODELS for seed in seeds]
    return [_times_job(stages, 1 if budget.smoke else ROUNDS), *curricula]


def _curriculum(arm: str, seed: int, stages: Sequence[Stage], held_out: int) -> Job:
    sections = []
    for number, stage in enumerate(stages):
        model = MODELS[arm]
        if arm == SPARSE:
            model = {**model, "selector": {**model["selector"], **stage.selector}}
        # The Selector's share is looked at along the way; of a dense model that would cost more than it trains.
        sections.append(needles_run(model, seed, number, stage, held_out, looks=2 if arm == SPARSE else 1))
    return needles_job(arm, seed, sections, stages)


def _times_job(stages: Sequence[Stage], rounds: int) -> Job:
    """Forward and backward pass of one batch at every length, both models in turns."""

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        works: dict[str, Callable[[], object]] = {}
        for arm in MODELS:
            model = _fresh(arm)
            works |= {f"{arm}_{stage.length}": _pass(model, stage) for stage in stages}
        watch.tell(f"{len(works)} shapes, {rounds} rounds")
        return {name: times.fastest for name, times in interleaved(works, rounds).items()}

    return Job(TIMES, 0, {"stages": [asdict(stage) for stage in stages], "rounds": rounds, "models": MODELS}, work)


def _fresh(arm: str) -> MillionModel | TextClassifier:
    if arm == SPARSE:
        # As after training: the needles, and little else, are kept.
        sparse = {**MODELS[arm], "selector": {**MODELS[arm]["selector"], "gate": "top_k", "rate": 1e-3}}
        return MillionModel(MillionConfig.model_validate(sparse))
    return TextClassifier(TextClassifierConfig.model_validate(MODELS[arm]))


def _pass(model: MillionModel | TextClassifier, stage: Stage) -> Callable[[], None]:
    needles = Needles(0, stage.length, NOISE, SYMBOLS, COPIES)
    drawn = [needles(index) for index in range(stage.batch)]
    tokens_BL = torch.stack([torch.from_numpy(tokens) for tokens, _ in drawn])
    classes_B = torch.tensor([label for _, label in drawn])

    def work() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens_BL), classes_B).backward()

    return work


def _report(done: Sequence[Done]) -> Report:
    seconds = first_scores(done, TIMES)
    names = {name for one in done for name in one.scores if "accuracy" in name and "step" not in name}
    lengths = sorted(int(name.rpartition("_")[2]) for name in names)
    notes = (
        f"Of a sequence {COPIES} tokens are one symbol a of one alphabet and {COPIES} one symbol b of another, at "
        f"random places among {NOISE} kinds of noise. The class is a + b; who sees one of the needles, or none, is "
        f"right {1 / SYMBOLS:.0%} of the time at best. Both models are trained on the same sequences in the same "
        "order, first short ones, then longer ones.",
        f"Width {SIZE}, {HEADS} heads, one layer each. The sparse one keeps tokens by a straight-through gate, at most "
        "512, and has two experts; the dense one has random feature attention (16 features) over all tokens, and mean "
        "pooling. The Selector keeps everything in the first stage and learns from the second on, "
        "held from both sides to a rate a little above the share of needles.",
        "Seconds of a training step: forward and backward pass, one thread, the fastest of rounds taken in turns; of "
        "the sparse model with one token in a thousand kept. In training it first keeps more.",
        "Kept is the share of the tokens of held-out sequences that pass the threshold after training at that length.",
    )
    panels = (
        ("accuracy on held-out sequences", _draw(done, lengths, "accuracy")),
        ("share of tokens kept, as sequences grow longer", _draw_kept(done)),
    )
    return Report((_table(done, lengths, seconds),), notes, panels)


def _table(done: Sequence[Done], lengths: Sequence[int], seconds: Scores) -> Table:
    columns = ["length"]
    for arm in MODELS:
        columns += [f"{arm}: accuracy", "seconds per step"]
    rows = []
    for length in lengths:
        cells = [f"{length:,}"]
        for arm in MODELS:
            cells.append(mean_and_spread(of_arm(done, arm, f"accuracy_{length}"), 3))
            time = seconds.get(f"{arm}_{length}")
            cells.append("not measured" if time is None else f"{time:.3f}")
        cells.append(mean_and_spread(of_arm(done, SPARSE, f"kept_{length}"), 5))
        cells.append(mean_and_spread(of_arm(done, SPARSE, f"dropped_{length}"), 5))
        rows.append(tuple(cells))
    title = "Held-out accuracy after training at each length; mean and deviation over seeds"
    return Table(title, (*columns, "kept", "dropped at experts"), tuple(rows))


def _draw(done: Sequence[Done], lengths: Sequence[int], score: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for arm in MODELS:
            for one in done:
                known = [length for length in lengths if f"{score}_{length}" in one.scores]
                if one.arm == arm:
                    values = [one.scores[f"{score}_{length}"] for length in known]
                    colour = f"C{list(MODELS).index(arm)}"
                    axes.plot(known, values, marker="o", color=colour, label=f"{arm}, seed {one.seed}")
        axes.axhline(1 / SYMBOLS, color="black", linestyle="--", linewidth=0.8, label="chance")
        axes.set(xscale="log", xlabel="length", ylabel=score, ylim=(0, 1.03))
        axes.legend(fontsize=7)

    return draw


def _draw_kept(done: Sequence[Done]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for one in done:
            points = sorted(
                (int(name.rpartition("_")[2]), value)
                for name, value in one.scores.items()
                if name.startswith("kept_at_step_")
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"seed {one.seed}")
        step = 0
        for stage in STAGES:
            here = (step, step + stage.steps)
            axes.plot(here, [2 * COPIES / stage.length] * 2, color="black", linestyle="--", linewidth=0.8)
            step = here[1]
        axes.set(
            xlabel="step of all stages (dashed: the share of needles)", ylabel="share of tokens kept", yscale="log"
        )
        axes.legend(fontsize=7)

    return draw


NEEDLES = Experiment(
    "uv-needles",
    "Does a model that selects tokens find what a dense one of no lower cost does not, where few of 65,536 matter?",
    ("papers/tests/test_million.py", "papers/tests/test_needles.py"),
    _jobs,
    _report,
)
