"""Random Feature Attention, Table 3, accuracy: classes of long texts by exact attention and by random features."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measured import Axes, Table
from dist_attn.checkpoints import load_any_model
from dist_attn.training.run_folder import read_metrics
from dist_attn.training.run_log import Metrics
from dist_attn_papers.made_up import NUM_CLASSES, VOCAB_SIZE, ListOps
from dist_attn_papers.tables.arms import mark_seeds, minutes_of, of_arm, parameters_of
from dist_attn_papers.tables.counted_baselines import (
    byte_histogram_accuracy,
    first_operator_accuracy,
    pair_histogram_accuracy,
    towers_of,
)
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.passages import (
    AUTHORS,
    PassageSpec,
    author_files,
    draw_pairs,
    pair_files,
    read_passages,
    tokeniser_folder,
)
from dist_attn_papers.tables.training_job import RUN, count_parameters, model_folder, training_job, with_warmup

__all__ = ["RFA_TABLE3"]

WIDTH, LAYERS, HEADS, MLP, NUM_RANDOM = 64, 2, 2, 128, 64
ATTENTION: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "rfa-gaussian": {"attention": "rfa", "feature": "gaussian", "num_random": NUM_RANDOM},
    "rfa-arccos": {"attention": "rfa", "feature": "arc_cosine", "num_random": NUM_RANDOM},
}
OPTIMISER = {"kind": "muon", "learning_rate": 4e-3, "matrix_learning_rate": 3e-3, "weight_decay": 0.05}
BATCH = 8
LISTOPS: dict[str, Any] = {
    "kind": "listops",
    "min_length": 500,
    "max_length": 2000,
    "examples": 96_000,
    "validation_examples": 1000,
}
# What each model is trained on first: a few hundred steps do not find the operator that counts among 1,000 tokens.
SHORT = {**LISTOPS, "min_length": 10, "max_length": 100, "batch": 32}
SHORT_STEPS, LISTOPS_STEPS, PAIRS_STEPS = 600, 300, 250
# Authors likewise: a mean over thousands of bytes differs little between them. Short passages, many at a time and each
# read once, at a higher rate, find what tells them apart.
SHORT_BATCH, SHORT_PASSAGE_STEPS, AUTHORS_STEPS = 32, 400, 100
SHORT_PASSAGE_OPTIMISER = {**OPTIMISER, "learning_rate": 2e-2, "matrix_learning_rate": 1e-2}
PASSAGES = PassageSpec(train=280, held_out=40)
SHORT_PASSAGES = PassageSpec(train=1280, held_out=40, min_length=512, max_length=512)
HALVES = PassageSpec(train=300, held_out=60, min_length=1024, max_length=2048)
HELD_OUT_PAIRS = 400
SMOKE_LISTOPS = {"min_length": 10, "max_length": 40, "examples": 40, "validation_examples": 8}
SMOKE_PASSAGES = PassageSpec(train=2, held_out=2, min_length=64, max_length=128)
TASKS = {
    "listops": "ListOps, 500 to 2,000 symbols",
    "authors": "author of 1,024 to 4,096 bytes, one of 10",
    "pairs": "one author or two, of two passages of 1,024 to 2,048 bytes",
}
# Arm, score, and what it is: classifiers without any attention, beside which the others stand.
COUNTED = {
    "listops": (
        ("listops-first-operator", "accuracy", "the commonest value under the outermost operator"),
        ("listops-first-operator", "commonest", "the commonest value"),
    ),
    "authors": (("authors-byte-histogram", "accuracy", "logistic regression on how often each byte occurs"),),
    "pairs": (("pairs-byte-histogram", "accuracy", "the same, on products and distances of both texts' counts"),),
}


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    jobs = []
    for seed in seeds:
        for attention in ATTENTION:
            jobs += [_authors_job(attention, seed, budget), _listops_job(attention, seed, budget)]
        jobs += [_pairs_job(attention, seed, budget) for attention in ATTENTION]
        if seed == seeds[0]:
            jobs += [_counted_listops(seed, budget), _counted_authors(seed, budget), _counted_pairs(seed, budget)]
    return jobs


def _model(attention: str, seed: int, vocabulary: int, classes: int, length: int, pooling: str) -> dict[str, Any]:
    mixer = {"kind": "bidirectional", "hidden_size": WIDTH, "num_heads": HEADS, "seed": 1000 * seed}
    encoder = {
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "mlp_size": MLP,
        "mixer": {**mixer, **ATTENTION[attention]},
        "positions": "learned",
        "max_length": length,
    }
    kind = {"kind": "text_classifier", "vocab_size": vocabulary, "num_classes": classes, "pooling": pooling}
    return {**kind, "encoder": encoder}


def _run(steps: int) -> dict[str, Any]:
    return {"steps": steps, "log_every": 20, "evaluate_every": steps, "checkpoint_every": max(1, steps // 4)}


def _listops_job(attention: str, seed: int, budget: Budget) -> Job:
    smoke = SMOKE_LISTOPS if budget.smoke else {}
    stages = {
        name: {"data": {**data, **smoke}, "optimiser": with_warmup(OPTIMISER, steps), "run": _run(steps)}
        for name, data, steps in (
            ("short", SHORT, budget.steps(SHORT_STEPS)),
            ("long", {**LISTOPS, "batch": BATCH}, budget.steps(LISTOPS_STEPS)),
        )
    }
    model = _model(attention, seed, VOCAB_SIZE, NUM_CLASSES, LISTOPS["max_length"] + 1, "class_token")
    arm, settings = f"listops-{attention}", {"task": "listops", "model": model, **stages}

    def work(folder: Path, watch: Watch) -> Scores:
        short, long = ({"model": model, **stages[name]} for name in ("short", "long"))
        return _in_two_stages(arm, seed, short, long, folder, watch)

    return Job(arm, seed, settings, work)


def _in_two_stages(
    arm: str, seed: int, short: Mapping[str, Any], long: Mapping[str, Any], folder: Path, watch: Watch
) -> Scores:
    """Train on short texts and go on with long ones; the scores of the latter, and the accuracy of the former."""
    found = training_job(arm, seed, short, _accuracy).work(folder / "short", watch)
    run = {**long["run"], "begin_from": str(folder / "short" / RUN / "model")}
    scores = training_job(arm, seed, {**long, "run": run}, _accuracy).work(folder, watch)
    return {**scores, "short_accuracy": found["accuracy"]}


def _authors_job(attention: str, seed: int, budget: Budget) -> Job:
    specs = {"short": SHORT_PASSAGES, "long": PASSAGES}
    if budget.smoke:
        specs = {"short": SMOKE_PASSAGES, "long": SMOKE_PASSAGES}
    model = _model(attention, seed, 257, len(AUTHORS), specs["long"].max_length, "mean")
    stages = {
        name: {
            "data": {"kind": "labelled_text", "max_length": specs[name].max_length, "batch": batch},
            "optimiser": with_warmup(optimiser, steps),
            "run": _run(steps),
        }
        for name, batch, optimiser, steps in (
            ("short", SHORT_BATCH, SHORT_PASSAGE_OPTIMISER, budget.steps(SHORT_PASSAGE_STEPS)),
            ("long", BATCH, OPTIMISER, budget.steps(AUTHORS_STEPS)),
        )
    }
    passages = {name: asdict(spec) for name, spec in specs.items()}
    arm, settings = f"authors-{attention}", {"task": "authors", "model": model, **stages, "passages": passages}

    def work(folder: Path, watch: Watch) -> Scores:
        made = folder.parent.parent / "passages"
        sections = {}
        for name, spec in specs.items():
            train, held_out = author_files(made, spec)
            files = {"train": [str(train)], "validation": [str(held_out)], "tokeniser": str(tokeniser_folder(made))}
            sections[name] = {"model": model, **stages[name], "data": {**stages[name]["data"], **files}}
        short, long = sections["short"], sections["long"]
        return _in_two_stages(arm, seed, short, long, folder, watch)

    return Job(arm, seed, settings, work)


def _pairs_read(budget: Budget) -> dict[str, int]:
    """Every pair is read once in training."""
    return {"train": BATCH * budget.steps(PAIRS_STEPS), "held_out": 8 if budget.smoke else HELD_OUT_PAIRS}


def _pairs_job(attention: str, seed: int, budget: Budget) -> Job:
    spec, steps = SMOKE_PASSAGES if budget.smoke else HALVES, budget.steps(PAIRS_STEPS)
    pairs = _pairs_read(budget)
    data = {"kind": "labelled_text", "second_text_field": "other", "max_length": spec.max_length, "batch": BATCH}
    longest = max(spec.max_length, (SMOKE_PASSAGES if budget.smoke else PASSAGES).max_length)  # the encoder's own
    sections = {
        "model": {**_model(attention, seed, 257, 2, longest, "mean"), "texts": 2},
        "data": data,
        "optimiser": with_warmup(OPTIMISER, steps),
        "run": _run(steps),
    }
    arm, begins = f"pairs-{attention}", f"authors-{attention}/seed-{seed}"
    settings = {"task": "pairs", **sections, "encoder_of": begins, "passages": asdict(spec), "pairs": pairs}

    def work(folder: Path, watch: Watch) -> Scores:
        experiment = folder.parent.parent
        made = experiment / "passages"
        train, held_out = pair_files(made, spec, **pairs)
        files = {"train": [str(train)], "validation": [str(held_out)], "tokeniser": str(tokeniser_folder(made))}
        start = towers_of(model_folder(experiment, begins), sections["model"], seed, folder / "start")
        run = {**sections["run"], "begin_from": str(start)}
        return training_job(arm, seed, {**sections, "run": run, "data": {**data, **files}}, _accuracy).work(
            folder, watch
        )

    return Job(arm, seed, settings, work, needs=(begins,))


def _accuracy(model: Path, last: Metrics, watch: Watch) -> Scores:
    """Of the last validation, also where the run had ended before this process began."""
    measured = [line for line in read_metrics(model.parent, last["step"]) if "accuracy" in line][-1]
    parameters = count_parameters(load_any_model(model))
    return {
        "accuracy": measured["accuracy"],
        "nats": measured["validation_loss"],
        "parameters": float(parameters),
        "held_out": float(measured["examples"]),
    }


def _counted_listops(seed: int, budget: Budget) -> Job:
    data: dict[str, Any] = {**LISTOPS, "examples": 4000, **(SMOKE_LISTOPS if budget.smoke else {})}

    def work(folder: Path, watch: Watch) -> Scores:
        expressions = ListOps(0, data["min_length"], data["max_length"])
        # The held-out expressions are those that the models are scored on.
        first = LISTOPS["examples"]
        held_out = range(first, first + data["validation_examples"])
        commonest, under = first_operator_accuracy(expressions, range(data["examples"]), held_out)
        return {"accuracy": under, "commonest": commonest, "held_out": float(len(held_out))}

    return Job("listops-first-operator", seed, {"task": "listops", "data": data}, work)


def _counted_authors(seed: int, budget: Budget) -> Job:
    spec = SMOKE_PASSAGES if budget.smoke else PASSAGES

    def work(folder: Path, watch: Watch) -> Scores:
        names = list(AUTHORS)
        sets = [([p.text for p in part], [names.index(p.author) for p in part]) for part in read_passages(spec)]
        accuracy = byte_histogram_accuracy(*sets[0], *sets[1])
        return {"accuracy": accuracy, "held_out": float(len(sets[1][0]))}

    return Job("authors-byte-histogram", seed, {"task": "authors", "passages": asdict(spec)}, work)


def _counted_pairs(seed: int, budget: Budget) -> Job:
    spec, counts = SMOKE_PASSAGES if budget.smoke else HALVES, _pairs_read(budget)

    def work(folder: Path, watch: Watch) -> Scores:
        sets = []
        for passages, number in zip(read_passages(spec), counts.values(), strict=True):
            pairs = draw_pairs(passages, number, spec.seed)
            sets.append(([(a.text, b.text) for a, b, _ in pairs], [int(same) for _, _, same in pairs]))
        accuracy = pair_histogram_accuracy(*sets[0], *sets[1])
        return {"accuracy": accuracy, "held_out": float(counts["held_out"])}

    settings = {"task": "pairs", "passages": asdict(spec), "pairs": counts}
    return Job("pairs-byte-histogram", seed, settings, work)


def _report(done: Sequence[Done]) -> Report:
    tables = [_table(task, done) for task in TASKS if any(one.settings["task"] == task for one in done)]
    differences = _differences(done)
    if differences.rows:
        tables.append(differences)
    panels = [(f"accuracy, {TASKS[task]}", partial(_bars, done, task)) for task in TASKS]
    return Report(tuple(tables), NOTES, tuple(panels))


def _table(task: str, done: Sequence[Done]) -> Table:
    rows = []
    for attention in ATTENTION:
        arm = f"{task}-{attention}"
        if any(one.arm == arm for one in done):
            found = [mean_and_spread([100 * value for value in of_arm(done, arm, "accuracy")], 1)]
            found += [mean_and_spread(of_arm(done, arm, "nats"), 3), parameters_of(done, arm), minutes_of(done, arm)]
            rows.append((attention, *found))
    for arm, score, words in COUNTED[task]:
        for value in of_arm(done, arm, score):
            rows.append((words, f"{100 * value:.1f}", "", "", ""))
    return Table(TASKS[task], ("attention", "accuracy, %", "nats per text", "parameters", "minutes"), tuple(rows))


def _differences(done: Sequence[Done]) -> Table:
    """Seed by seed, since the arms of a seed read the same texts in the same order."""
    rows = []
    for task in TASKS:
        exact = {one.seed: one.scores["accuracy"] for one in done if one.arm == f"{task}-softmax"}
        for attention in list(ATTENTION)[1:]:
            ours = {one.seed: one.scores["accuracy"] for one in done if one.arm == f"{task}-{attention}"}
            gains = [100 * (ours[seed] - exact[seed]) for seed in sorted(ours.keys() & exact.keys())]
            if gains:
                each = ", ".join(f"{gain:+.1f}" for gain in gains)
                rows.append((task, attention, mean_and_spread(gains, 1), each))
    return Table(
        "Accuracy above softmax's, in points", ("task", "attention", "mean ± spread", "each seed"), tuple(rows)
    )


def _bars(done: Sequence[Done], task: str, axes: Axes) -> None:
    found = {attention: of_arm(done, f"{task}-{attention}", "accuracy") for attention in ATTENTION}
    mark_seeds(axes, {attention: [100 * share for share in shares] for attention, shares in found.items()})
    for number, (arm, score, words) in enumerate(COUNTED[task]):
        for value in of_arm(done, arm, score)[:1]:
            axes.axvline(100 * value, linestyle=":", color=f"C{number + 1}", label=words)
    axes.set_xlabel("held-out accuracy, %; every seed, and their mean")
    axes.legend(fontsize=7, loc="lower left", framealpha=0.6)


NOTES = (
    f"{LAYERS} layers, {WIDTH} wide, {HEADS} heads, MLP {MLP}, D = {NUM_RANDOM} random vectors for each head. Held "
    "equal: texts and their order, steps, batch, schedule, optimiser (Muon and AdamW, one learning rate for all). The "
    "accuracy is that of the last step on all held-out texts; nothing was chosen by it. A seed sets weights, random "
    "features and the order of the texts.",
    f"ListOps: {SHORT_STEPS} steps of {SHORT['batch']} expressions of 10 to 100 symbols, then {LISTOPS_STEPS} of "
    f"{BATCH} of 500 to 2,000, which are scored; learned positions and a class token. Long Range Arena trains on the "
    "long ones alone, and far longer.",
    f"Authors: {SHORT_PASSAGE_STEPS} steps of {SHORT_BATCH} passages of 512 bytes, then {AUTHORS_STEPS} of "
    f"{BATCH} passages of 1,024 to 4,096 bytes, which are scored; the mean of all tokens. A book is cut into "
    "40 parts, every fifth is held out, so no passage is of both; characters' names are. Lines, quotation "
    "marks, dashes, brackets and italics are made alike before, for they are the edition's.",
    f"Pairs: {PAIRS_STEPS} steps of {BATCH} pairs of passages of 1,024 to 2,048 bytes, half of them by one author; "
    "both go through one encoder, and an MLP reads [h1, h2, h1 * h2, h1 - h2]. Held-out passages pair with each other. "
    "The encoder begins with that of the authors' classifier of the same attention and seed (trained on passages of "
    "the same parts): from nothing the loss stood at 0.69 after 180 steps.",
    "The paper's texts are others (IMDb reviews, AAN) and its training is longer; only the order of the arms is "
    "compared, not their height. No pool of random matrices.",
)

RFA_TABLE3 = Experiment(
    "rfa-table3",
    "Random Feature Attention, Table 3: do classifiers of long texts with random features come up to those with exact "
    "attention?",
    (
        "papers/tests/test_rfa_table3.py",
        "tests/models/test_classifiers.py",
        "tests/models/test_packed_texts.py",
        "tests/training/test_tasks.py",
    ),
    _jobs,
    _report,
)
