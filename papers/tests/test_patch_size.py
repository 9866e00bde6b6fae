"""The experiment with patches of digits: what lies on the canvases, which jobs there are, and partial reports."""

import json
from pathlib import Path

import numpy as np
import pytest

from dist_attn_papers.tables.experiment import Budget, Done
from dist_attn_papers.tables.patch_size import (
    CANVAS,
    PATCH_SIZE,
    PATCHES,
    SCALE,
    TIMES,
    make_canvases,
    model_section,
    read_digits,
    split_digits,
)
from dist_attn_papers.vision.config import VisionClassifierConfig


def test_no_digit_is_trained_on_and_held_out() -> None:
    """The split takes every image once, and about as many of each digit."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
    images, shown = read_digits()
    (kept, kept_shown), (held, held_shown) = split_digits((images, shown))
    assert len(kept) + len(held) == len(images) == 1797
    counts = [np.unique(part.reshape(len(part), -1), axis=0, return_counts=True)[1].sum() for part in (kept, held)]
    assert sum(counts) == 1797 and kept.sum() + held.sum() == images.sum()
    assert set(kept_shown) == set(held_shown) == set(range(10))


def test_a_canvas_shows_its_digit_whole(tmp_path: Path) -> None:
    """Somewhere on each canvas the labelled digit stands, enlarged; the same seed draws the same."""
    draw = np.random.default_rng(3)
    images = draw.integers(1, 255, (4, 8, 8), dtype=np.uint8)
    for name in ("one.npz", "two.npz"):
        make_canvases((images, np.arange(4)), 6, 5, tmp_path / name)
    one, two = (np.load(tmp_path / name) for name in ("one.npz", "two.npz"))
    assert one["images"].shape == (6, CANVAS, CANVAS)
    assert (one["images"] == two["images"]).all()
    for canvas, label in zip(one["images"], one["labels"], strict=True):
        large = images[label].repeat(SCALE, 0).repeat(SCALE, 1)
        windows = np.lib.stride_tricks.sliding_window_view(canvas, large.shape)
        assert (windows == large).all((2, 3)).any()


def test_arms_differ_in_their_patches_alone() -> None:
    """Every arm cuts the same canvases evenly; settings are JSON without paths; seeds come one after the other."""
    jobs = PATCH_SIZE.jobs(Budget(), (0, 1))
    assert all('"/' not in json.dumps(job.settings) for job in jobs)
    assert [job.seed for job in jobs] == [0] * (1 + len(PATCHES)) + [1] * len(PATCHES)
    sections = [model_section(patch) for patch in PATCHES]
    tokens = [VisionClassifierConfig.model_validate(section).image.num_patches for section in sections]
    assert tokens == [1024, 256, 64, 16, 4]
    assert len({json.dumps({**section, "image": 0, "encoder": 0}) for section in sections}) == 1


def test_the_report_of_what_is_done() -> None:
    """Accuracy is a mean over seeds in percent; what is not there yet is said not to be measured."""
    scores = {"accuracy": 0.5, "parameters": 1000.0}
    done = [Done("patch-4", seed, {**scores, "accuracy": 0.5 + 0.1 * seed}, 1.0, {}, "") for seed in (0, 1)]
    rows = {row[0]: row for row in PATCH_SIZE.report(done).tables[0].rows}
    assert rows["4"] == ("4", "256", "1,000", "55.0 ± 7.1 (2)", "not measured")
    assert rows["2"][3] == "not measured"
    timed = Done(TIMES, 0, {f"patch-{patch}": 0.25 for patch in PATCHES}, 1.0, {}, "")
    assert PATCH_SIZE.report([timed]).tables[0].rows[0][4] == "0.250"
