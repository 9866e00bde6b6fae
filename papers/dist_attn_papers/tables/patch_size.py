"""Figure 1 of Unified View: accuracy of a vision transformer, and time of a step, against the size of its patches."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measured import Axes, Table
from benchmarks.timing import interleaved
from dist_attn.checkpoints import load_any_model
from dist_attn.errors import ConfigError
from dist_attn.training.run_log import Metrics
from dist_attn_papers.tables.arms import first_scores, of_arm, parameters_of
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report, mean_and_spread
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.training_job import count_parameters, training_job, with_warmup
from dist_attn_papers.vision.config import VisionClassifierConfig
from dist_attn_papers.vision.model import VisionClassifier

__all__ = ["CANVAS", "PATCH_SIZE", "SCALE", "make_canvases", "model_section", "read_digits", "split_digits"]

PATCHES = (2, 4, 8, 16, 32)
IMAGES, HELD_OUT_IMAGES, BATCH, STEPS = 8000, 1000, 16, 800
SMOKE_IMAGES = 64
WIDTH, LAYERS, HEADS = 64, 2, 2
TIMES, ROUNDS = "times", 5
OPTIMISER = {"kind": "muon", "learning_rate": 1e-2, "matrix_learning_rate": 5e-3, "final_ratio": 0.05}
TRAIN, VALIDATION = "train.npz", "validation.npz"
# A digit of 48 pixels on a canvas of 64, at any of 17 x 17 places: small models learn no smaller ones so fast.
CANVAS, SCALE = 64, 6
GREYS = 16
HELD_OUT_SHARE = 0.2

Digits = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images [N, 8, 8] and the digits that they show [N]."""


def read_digits() -> Digits:
    """The 1,797 images of digits that come with scikit-learn.

    Raises: ConfigError where it is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    found = load_digits()
    return (found.images * (255 / GREYS)).astype(np.uint8), found.target.astype(np.int64)


def split_digits(digits: Digits) -> tuple[Digits, Digits]:
    """For training, and for validation: no image of a digit is in both."""
    images_NHW, shown_N = digits
    order_N = np.random.default_rng(0).permutation(len(images_NHW))
    held_out, kept = np.split(order_N, [round(HELD_OUT_SHARE * len(order_N))])
    return (images_NHW[kept], shown_N[kept]), (images_NHW[held_out], shown_N[held_out])


def make_canvases(digits: Digits, count: int, seed: int, path: Path) -> None:
    """Write `count` canvases and what they show as the arrays `images` and `labels` of an .npz file."""
    canvases, labels = zip(*_pasted(digits, count, np.random.default_rng(seed)), strict=True)
    with path.open("wb") as file:
        np.savez_compressed(file, images=np.stack(canvases), labels=np.array(labels))


def _pasted(digits: Digits, count: int, draw: np.random.Generator) -> Iterator[tuple[NDArray[np.uint8], np.int64]]:
    images_NHW, shown_N = digits
    for _ in range(count):
        canvas_HW = np.zeros((CANVAS, CANVAS), np.uint8)
        number = draw.integers(len(images_NHW))
        large_HW = np.kron(images_NHW[number], np.ones((SCALE, SCALE), np.uint8))
        row, column = draw.integers(0, CANVAS - len(large_HW) + 1, 2)
        canvas_HW[row : row + len(large_HW), column : column + len(large_HW)] = large_HW
        yield canvas_HW, shown_N[number]


def model_section(patch: int) -> dict[str, Any]:
    """The section [model]: everything but the patch, and what follows from it, is the same for all arms."""
    mixer = {"kind": "bidirectional", "attention": "softmax", "hidden_size": WIDTH, "num_heads": HEADS}
    return {
        "kind": "vision_classifier",
        "num_classes": 10,
        "image": {"height": CANVAS, "width": CANVAS, "channels": 1, "patch": patch},
        "pooling": "mean",
        "encoder": {
            "hidden_size": WIDTH,
            "num_layers": LAYERS,
            "mlp_size": 2 * WIDTH,
            "mixer": mixer,
            "positions": "learned",
            "max_length": (CANVAS // patch) ** 2,
        },
    }


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    images = {"train": SMOKE_IMAGES if budget.smoke else IMAGES}
    images["validation"] = SMOKE_IMAGES if budget.smoke else HELD_OUT_IMAGES
    trained = [_job(patch, seed, images, budget.steps(STEPS)) for seed in seeds for patch in PATCHES]
    return [_times_job(1 if budget.smoke else ROUNDS), *trained]


def _job(patch: int, seed: int, images: dict[str, int], steps: int) -> Job:
    model = model_section(patch)
    optimiser = with_warmup(OPTIMISER, steps)
    settings = {"model": model, "images": images, "batch": BATCH, "steps": steps, "optimiser": optimiser}

    def measure(folder: Path, last: Metrics, watch: Watch) -> Scores:
        counted = count_parameters(load_any_model(folder))
        return {"accuracy": float(last["accuracy"]), "parameters": float(counted)}

    def work(folder: Path, watch: Watch) -> Scores:
        sections = {
            "model": model,
            "data": {
                "kind": "images",
                "folder": str(_canvases(folder.parents[1], images)),
                "train": TRAIN,
                "validation": VALIDATION,
                "batch": BATCH,
            },
            "optimiser": optimiser,
            "run": {
                "steps": steps,
                "dtype": "float32",  # narrow layers gain nothing from it
                "log_every": max(1, steps // 10),
                "evaluate_every": steps,
                "checkpoint_every": max(1, steps // 4),
            },
        }
        return training_job(f"patch-{patch}", seed, sections, measure).work(folder, watch)

    return Job(f"patch-{patch}", seed, {**settings, "seed": seed}, work)


def _canvases(made: Path, images: dict[str, int]) -> Path:
    """The folder of the canvases, drawn once: all arms and seeds see the same ones."""
    folder = made / f"canvases-{images['train']}-{images['validation']}"
    for seed, (name, digits) in enumerate(zip((TRAIN, VALIDATION), split_digits(read_digits()), strict=True)):
        count = images[name.removesuffix(".npz")]
        make_once(folder / name, partial(make_canvases, digits, count, seed))
    return folder


def _times_job(rounds: int) -> Job:
    """Forward and backward pass of a batch at every patch size, in turns."""

    def work(folder: Path, watch: Watch) -> Scores:
        torch.set_num_threads(1)
        taken = interleaved({f"patch-{patch}": _pass(patch) for patch in PATCHES}, rounds)
        return {arm: times.fastest for arm, times in taken.items()}

    models = {str(patch): model_section(patch) for patch in PATCHES}
    return Job(TIMES, 0, {"models": models, "batch": BATCH, "rounds": rounds}, work)


def _pass(patch: int) -> Callable[[], None]:
    """A training step without its optimiser."""
    model = VisionClassifier(VisionClassifierConfig.model_validate(model_section(patch)))
    patches_BTN = model.prepare(torch.randn(BATCH, 1, CANVAS, CANVAS))

    def work() -> None:
        model.zero_grad()
        model(patches_BTN).logsumexp(1).sum().backward()

    return work


def _report(done: Sequence[Done]) -> Report:
    seconds = first_scores(done, TIMES)
    accuracy = {patch: of_arm(done, f"patch-{patch}", "accuracy") for patch in PATCHES}
    rows = []
    for patch in PATCHES:
        arm = f"patch-{patch}"
        rows.append(
            (
                str(patch),
                f"{(CANVAS // patch) ** 2:,}",
                parameters_of(done, arm),
                mean_and_spread([100 * share for share in accuracy[patch]], 1),
                f"{seconds[arm]:.3f}" if arm in seconds else "not measured",
            )
        )
    columns = ("patch", "tokens", "parameters", "accuracy, %", "seconds per step")
    notes = (
        f"Digits of 8 x 8 pixels, enlarged, on canvases of {CANVAS} x {CANVAS}, {LAYERS} layers of width {WIDTH}, "
        f"softmax, learned positions, {STEPS} steps of {BATCH} images; the held-out canvases show digits that training "
        "does not.",
        "The paper fine-tunes ViT-B, trained on ImageNet, on photographs; here small models begin from nothing. "
        "Parameters differ by the map of a patch and the table of positions.",
        "Seconds: forward and backward pass of a batch, one thread, float32, the fastest of rounds taken in turns.",
    )
    panels = (("accuracy, %", _draw_accuracy(accuracy)), ("seconds per step", _draw_seconds(seconds)))
    return Report((Table("Accuracy and time by patch size", columns, tuple(rows)),), notes, panels)


def _draw_accuracy(accuracy: dict[int, list[float]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        found = {patch: values for patch, values in accuracy.items() if values}
        axes.plot(list(found), [100 * fmean(values) for values in found.values()], marker="o")
        for patch, values in found.items():
            axes.plot([patch] * len(values), [100 * value for value in values], "k.", markersize=4)
        axes.set(xscale="log", xlabel="side of a patch, pixels", ylabel="accuracy, %")

    return draw


def _draw_seconds(seconds: Scores) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        known = [patch for patch in PATCHES if f"patch-{patch}" in seconds]
        axes.loglog(known, [seconds[f"patch-{patch}"] for patch in known], marker="o")
        axes.set(xlabel="side of a patch, pixels", ylabel="seconds")

    return draw


PATCH_SIZE = Experiment(
    name="uv-patch",
    question=(
        "A Unified View of Long-Sequence Models, Figure 1: does a vision transformer classify better with smaller "
        "patches, and what do they cost?"
    ),
    tests=("tests/training/test_tasks.py", "papers/tests/test_patch_size.py"),
    jobs=_jobs,
    report=_report,
)
