"""`dist-attn bench mixers`: quality, speed and memory of all mixers, at equal parameters and tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measured import Axes, Table
from dist_attn.checkpoints import load_any_model
from dist_attn.training.run_folder import read_metrics
from dist_attn.training.run_log import Metrics
from dist_attn_papers.made_up import NUM_CLASSES, VOCAB_SIZE
from dist_attn_papers.tables import books
from dist_attn_papers.tables.books import BookModel
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.mixer_arms import (
    CAUSAL,
    ENCODERS,
    HYBRID,
    LAYERS_ALONE,
    equal_mlp,
    layer_config,
    mixer_values,
)
from dist_attn_papers.tables.mixer_speed import LENGTHS, ROUNDS, SPEED, speed_jobs
from dist_attn_papers.tables.mixer_speed import WIDTH as LAYER_WIDTH
from dist_attn_papers.tables.recall_tasks import TASKS, VOCABULARY, accuracy_at, recall_job
from dist_attn_papers.tables.training_job import training_job

__all__ = ["MIXERS"]

MODELS = (*CAUSAL, HYBRID)
BOOK_STEPS = 300
WIDTH, LAYERS, HEADS, MLP = 64, 2, 2, 128
RECALL: dict[str, Any] = {
    "batch": 32,
    "longest": 128,
    "distances": (16, 64, 256, 1024),
    "asked": 32,
    "learning_rate": 3e-3,
}
RECALL_STEPS = 1200
SMOKE_RECALL: dict[str, Any] = {**RECALL, "batch": 2, "longest": 8, "distances": (4, 8), "asked": 8}
LISTOPS: dict[str, Any] = {
    "kind": "listops",
    "min_length": 10,
    "max_length": 100,
    "examples": 40_000,
    "validation_examples": 500,
    "batch": 32,
}
SMOKE_LISTOPS = {"examples": 40, "validation_examples": 8, "max_length": 40}
LISTOPS_STEPS = 1000
OPTIMISER = {"kind": "muon", "learning_rate": 4e-3, "matrix_learning_rate": 3e-3, "weight_decay": 0.05}


Speeds = dict[int, Scores]
"""By length: what the job of that length has found."""


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    """Speed first, which needs no training; then every task with all its mixers."""
    jobs = speed_jobs(budget)
    for seed in seeds:
        jobs += [_book_job(arm, seed, budget) for arm in MODELS]
        jobs += [_recall_job(task, arm, seed, budget) for task in TASKS for arm in MODELS]
        jobs += [_listops_job(arm, seed, budget) for arm in ENCODERS]
    return jobs


def _book_job(arm: str, seed: int, budget: Budget) -> Job:
    mixer = mixer_values(arm, books.WIDTH, books.HEADS, seed)
    size = equal_mlp(mixer, mixer_values("softmax", books.WIDTH, books.HEADS, seed), books.WIDTH, books.MLP)
    return BookModel(mixer, steps=BOOK_STEPS, mlp_size=size, whole=True).job(f"books-{arm}", seed, budget)


def _recall_job(task: str, arm: str, seed: int, budget: Budget) -> Job:
    mixer = mixer_values(arm, WIDTH, HEADS, seed, LAYERS)
    model = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "mlp_size": equal_mlp(mixer, mixer_values("softmax", WIDTH, HEADS, seed), WIDTH, MLP),
        "mixer": mixer,
    }
    chosen = SMOKE_RECALL if budget.smoke else RECALL
    return recall_job(task, arm, seed, {"model": model, "steps": budget.steps(RECALL_STEPS), **chosen})


def _listops_job(arm: str, seed: int, budget: Budget) -> Job:
    steps, data = budget.steps(LISTOPS_STEPS), {**LISTOPS, **(SMOKE_LISTOPS if budget.smoke else {})}
    length = LISTOPS["max_length"] + 1
    mixer, softmax = (layer_config(ENCODERS[one], WIDTH, HEADS, length) for one in (arm, "softmax"))
    encoder = {
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "mlp_size": equal_mlp(mixer, softmax, WIDTH, MLP),
        "mixer": mixer,
        "positions": "learned",
        "max_length": length,
    }
    kind = {"kind": "text_classifier", "vocab_size": VOCAB_SIZE, "num_classes": NUM_CLASSES, "pooling": "class_token"}
    run = {"steps": steps, "log_every": 50, "evaluate_every": steps, "checkpoint_every": max(1, steps // 4)}
    optimiser = {**OPTIMISER, "warmup_steps": max(1, steps // 10)}
    sections = {"model": {**kind, "encoder": encoder}, "data": data, "optimiser": optimiser, "run": run}
    return training_job(f"listops-{arm}", seed, sections, _accuracy)


def _accuracy(model: Path, last: Metrics, watch: Watch) -> Scores:
    """Of the last validation, also where the run had ended before this process began."""
    measured = [line for line in read_metrics(model.parent, last["step"]) if "accuracy" in line][-1]
    parameters = sum(parameter.numel() for parameter in load_any_model(model).parameters())
    return {"accuracy": measured["accuracy"], "parameters": float(parameters)}


def _report(done: Sequence[Done]) -> Report:
    speeds: Speeds = {int(one.settings["length"]): one.scores for one in done if one.arm.startswith(f"{SPEED}-")}
    tables = (_quality(done), _recall(done), _listops(done), _speed(speeds), _memory(speeds))
    panels: list[tuple[str, Callable[[Axes], None]]] = []
    if speeds:  # without any there is nothing that a logarithmic axis could show
        panels += [
            ("seconds of a layer, forward and backward", partial(_draw_speed, speeds, "training", 1.0)),
            ("MiB of a layer, forward and backward", partial(_draw_speed, speeds, "training_bytes", 2**-20)),
        ]
    panels += [(f"{task}: right answers after so much noise", partial(_draw_recall, done, task)) for task in TASKS]
    return Report(tuple(table for table in tables if table.rows), NOTES, tuple(panels))


def _scores(done: Sequence[Done], arm: str, name: str) -> list[float]:
    return [one.scores[name] for one in done if one.arm == arm and name in one.scores]


def _quality(done: Sequence[Done]) -> Table:
    rows = []
    for arm in MODELS:
        job = f"books-{arm}"
        if parameters := _scores(done, job, "parameters"):
            found = [
                mean_and_spread(_scores(done, job, f"{split}_bits_per_byte"), 3) for split in ("development", "test")
            ]
            minutes = [one.seconds / 60 for one in done if one.arm == job]
            rows.append((arm, *found, f"{parameters[0]:,.0f}", mean_and_spread(minutes, 1)))
    columns = ("mixer", "Great Expectations", "War and Peace", "parameters", "minutes")
    return Table("Bits per byte of books that were not trained on", columns, tuple(rows))


def _distances(done: Sequence[Done]) -> list[int]:
    return sorted({d for one in done if one.settings.get("task") in TASKS for d in one.settings["distances"]})


def _recall(done: Sequence[Done]) -> Table:
    distances, rows = _distances(done), []
    for task in TASKS:
        for arm in MODELS:
            found = [_scores(done, f"{task}-{arm}", accuracy_at(distance)) for distance in distances]
            if any(found):
                rows.append((task, arm, *(mean_and_spread([100 * value for value in each], 0) for each in found)))
    columns = ("task", "mixer", *(f"after {distance:,}" for distance in distances))
    return Table("Right answers in per cent after so many tokens of noise", columns, tuple(rows))


def _listops(done: Sequence[Done]) -> Table:
    rows = []
    for arm in ENCODERS:
        accuracy = [100 * value for value in _scores(done, f"listops-{arm}", "accuracy")]
        if accuracy:
            parameters = _scores(done, f"listops-{arm}", "parameters")[0]
            rows.append((arm, mean_and_spread(accuracy, 1), f"{parameters:,.0f}"))
    return Table("ListOps, 10 to 100 symbols: accuracy in per cent", ("encoder", "accuracy", "parameters"), tuple(rows))


def _timed(speeds: Speeds) -> list[str]:
    """The mixers that were timed at every length: those that came later are not in results that lie filed."""
    return [arm for arm in LAYERS_ALONE if speeds and all(f"{arm}:forward" in each for each in speeds.values())]


def _speed(speeds: Speeds) -> Table:
    lengths, rows = sorted(speeds), []
    for arm in _timed(speeds):
        cells = [f"{1e6 * speeds[length][f'{arm}:{what}'] / length:.2f}" for what in _PASSES for length in lengths]
        step = speeds[lengths[-1]].get(f"{arm}:step")
        rows.append((arm, *cells, "" if step is None else f"{1e6 * step:.0f}"))
    columns = [f"{what}, {length:,}" for what in _PASSES.values() for length in lengths]
    last = f"one more token behind {lengths[-1]:,}" if lengths else ""
    return Table("Microseconds per token of a layer, on one core", ("mixer", *columns, last), tuple(rows))


def _memory(speeds: Speeds) -> Table:
    lengths, rows = sorted(speeds), []
    for arm in _timed(speeds):
        cells = [
            f"{speeds[length][f'{arm}:{what}_bytes'] / length / 1024:.2f}" for what in _PASSES for length in lengths
        ]
        rows.append((arm, *cells))
    columns = [f"{what}, {length:,}" for what in _PASSES.values() for length in lengths]
    return Table("Peak of tensors of a layer above weights, in KiB per token", ("mixer", *columns), tuple(rows))


_PASSES = {"forward": "forward", "training": "forward and backward"}


def _draw_speed(speeds: Speeds, what: str, unit: float, axes: Axes) -> None:
    for number, arm in enumerate(_timed(speeds)):
        values = {length: unit * speeds[length][f"{arm}:{what}"] for length in sorted(speeds)}
        style = "-" if number < 10 else "--"
        axes.plot(list(values), list(values.values()), style, marker="o", color=f"C{number % 10}", label=arm)
    axes.set(xscale="log", yscale="log", xlabel="tokens")
    axes.legend(fontsize=6, ncols=2)


def _draw_recall(done: Sequence[Done], task: str, axes: Axes) -> None:
    distances = _distances(done)
    for number, arm in enumerate(MODELS):
        found = {d: _scores(done, f"{task}-{arm}", accuracy_at(d)) for d in distances}
        points = {d: 100 * sum(values) / len(values) for d, values in found.items() if values}
        style = "-" if number < 10 else "--"
        axes.plot(list(points), list(points.values()), style, marker="o", color=f"C{number % 10}", label=arm)
    axes.axvline(RECALL["longest"], color="black", linestyle=":", label="longest in training")
    axes.set(xscale="log", xlabel="tokens of noise", ylabel="right answers, %")
    axes.legend(fontsize=6, ncols=2)


NOTES = (
    "Language models have as many parameters as that with softmax: the MLP is wider where the mixer has fewer. Options "
    "are as they are by default (a short convolution of 4 tokens before kernel attention and softmax), but for states "
    "of 16 numbers in s4, lssl and hippo. hybrid is rfa_gate but for its last layer, which is softmax.",
    f"Books: {books.LAYERS} layers of width {books.WIDTH}, {BOOK_STEPS} steps of {books.BATCH} x {books.BLOCK} tokens "
    f"of a vocabulary of {books.VOCABULARY:,}; every block stands alone, in training and in the scores.",
    f"Recall and copy: {LAYERS} layers of width {WIDTH}, no positions, {RECALL_STEPS} steps of "
    f"{RECALL['batch']} sequences with up to {RECALL['longest']} tokens of noise; longer ones are asked, not trained "
    "on. Guessing gives 6 % (recall) and 3 % (copy).",
    f"ListOps: {LISTOPS_STEPS} steps of {LISTOPS['batch']} expressions, learned positions, a class token; parameters "
    "as equal.",
    f"A layer of width {LAYER_WIDTH} with {HEADS} heads, one core, float32: the fastest of {ROUNDS} rounds taken in "
    "turns.",
    "Mixers that take a sequence whole cannot write, so they have no language model; mlp_mixer takes one length, so no "
    "texts of several.",
)

MIXERS = Experiment(
    name="mixers",
    question=(
        "What is each mixer good for: bits per byte of books, recall and copy at growing distance, ListOps, and time "
        f"and memory at {' to '.join(f'{length:,}' for length in (LENGTHS[0], LENGTHS[-1]))} tokens, at equal size?"
    ),
    tests=("papers/tests/test_mixers.py", "tests/mixers/test_contract.py"),
    jobs=_jobs,
    report=_report,
    seeds=(0,),
)
