"""A small run of each of the papers' kinds of models, and on ListOps, over data that can be learnt in seconds."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tasks import ENCODER, RUNS, SIZE, small_task

__all__ = ["PAPERS_RUNS", "small_task"]

IMAGE = {"height": 8, "width": 8, "channels": 1, "patch": 2}
SELECTOR = {"gate": "gumbel", "initial_logit": 3.0, "rate_weight": 0.1}
PATCHES = {**ENCODER, "positions": "learned", "max_length": 17}


def _million(place: Path) -> dict[str, Any]:
    """Needles of two alphabets in noise; two experts, gates with noise."""
    sparse = {"hidden_size": SIZE, "num_heads": 2, "mlp_size": 32, "router": {"num_experts": 2}, "positions": "none"}
    return {
        "model": {"kind": "million", "vocab_size": 12, "num_classes": 3, "selector": SELECTOR, **sparse},
        "data": {
            "kind": "needles",
            "length": 13,
            "noise": 8,
            "symbols": 2,
            "copies": 2,
            "examples": 60,
            "validation_examples": 11,
            "batch": 6,
        },
    }


def _listops(place: Path) -> dict[str, Any]:
    lengths = {"min_length": 4, "max_length": 12, "max_depth": 3, "max_args": 4}
    return {
        "model": {"kind": "text_classifier", "vocab_size": 15, "num_classes": 10, "encoder": ENCODER},
        "data": {"kind": "listops", **lengths, "examples": 40, "validation_examples": 11, "batch": 6},
    }


def _write_images(place: Path) -> None:
    """Noise that is brighter in the upper half, or in the lower one; the class says where."""
    random = np.random.default_rng(0)
    for name, count in (("train", 40), ("validation", 13)):
        labels = np.arange(count) % 2
        images = random.integers(0, 100, (count, 8, 8))
        images[labels == 0, :4] += 100
        images[labels == 1, 4:] += 100
        np.savez(place / f"{name}.npz", images=images.astype(np.uint8), labels=np.array(["up", "down"])[labels])


def _vision(place: Path) -> dict[str, Any]:
    _write_images(place)
    data = {"kind": "images", "folder": place, "train": "train.npz", "validation": "validation.npz", "batch": 6}
    return {"model": {"kind": "vision_classifier", "num_classes": 2, "image": IMAGE, "encoder": PATCHES}, "data": data}


def _autoencoder(place: Path) -> dict[str, Any]:
    _write_images(place)
    data = {"kind": "images", "folder": place, "train": "train.npz", "validation": "validation.npz", "batch": 6}
    encoder = {**PATCHES, "max_length": 16}
    return {"model": {"kind": "masked_autoencoder", "image": IMAGE, "encoder": encoder}, "data": data}


def _translation(place: Path) -> dict[str, Any]:
    """One small letter 2 to 6 times, in capitals."""
    random = np.random.default_rng(0)
    for name, count in (("train", 80), ("validation", 13)):
        words = [str(random.choice(list("abc"))) * int(random.integers(2, 7)) for _ in range(count)]
        (place / f"{name}.small").write_text("".join(f"{word}\n" for word in words))
        (place / f"{name}.large").write_text("".join(f"{word.upper()}\n" for word in words))
    heads = {"hidden_size": SIZE, "num_heads": 2}
    decoder = {
        "num_layers": 1,
        "mlp_size": 32,
        "mixer": {"kind": "rfa_gate", **heads, "num_random": 8},
        "cross": {"attention": "elu", **heads},
        "positions": "none",
    }
    encoder = {**ENCODER, "positions": "none"}
    return {
        "model": {"kind": "encoder_decoder", "vocab_size": 257, "encoder": encoder, "decoder": decoder},
        "data": {
            "kind": "parallel_text",
            "folder": place,
            "train_source": "train.small",
            "train_target": "train.large",
            "validation_source": "validation.small",
            "validation_target": "validation.large",
            "tokeniser": place / "tokeniser",
            "batch": 6,
            "translations": 5,
            "max_length": 8,
        },
    }


PAPERS_RUNS = {
    "million": _million,
    "listops": _listops,
    "vision": _vision,
    "autoencoder": _autoencoder,
    "translation": _translation,
}
RUNS.update(PAPERS_RUNS)
