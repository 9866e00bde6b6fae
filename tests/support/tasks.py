"""A small run of every kind of model, over data that can be learnt in seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dist_attn.text import ByteTokeniser
from dist_attn.training import TrainingConfig

__all__ = ["ENCODER", "RUNS", "SIZE", "small_task"]

SIZE = 16
BIDIRECTIONAL = {"kind": "bidirectional", "hidden_size": SIZE, "num_heads": 2}
ENCODER = {"hidden_size": SIZE, "num_layers": 1, "mlp_size": 32, "mixer": {**BIDIRECTIONAL, "attention": "elu"}}


def _labelled_text(place: Path) -> dict[str, Any]:
    """Texts of many a or many b, of 3 to 20 letters; the class is the letter."""
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("validation", 21)):
        lines = []
        for number in range(count):
            letter, other = ("a", "b") if number % 2 else ("b", "a")
            text = [letter if random.random() < 0.8 else other for _ in range(random.integers(3, 20))]
            lines.append(json.dumps({"text": letter + "".join(text), "label": f"much {letter}"}))
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return {
        "model": {"kind": "text_classifier", "vocab_size": 257, "num_classes": 2, "encoder": ENCODER},
        "data": {
            "kind": "labelled_text",
            "folder": place,
            "train": ["train.jsonl"],
            "validation": ["validation.jsonl"],
            "tokeniser": place / "tokeniser",
            "batch": 6,
            "max_length": 16,
        },
    }


def _pairs(place: Path) -> dict[str, Any]:
    """Two texts of many a or many b; the class says whether they are of one letter."""
    random = np.random.default_rng(0)
    for name, count in (("train", 60), ("validation", 21)):
        lines = []
        for _ in range(count):
            letters = random.choice(["a", "b"], 2).tolist()
            texts = [letter * int(random.integers(3, 9)) for letter in letters]
            label = "one" if letters[0] == letters[1] else "two"
            lines.append(json.dumps({"text": texts[0], "other": texts[1], "label": label}))
        (place / f"{name}-pairs.jsonl").write_text("\n".join(lines))
    return {
        "model": {"kind": "text_classifier", "vocab_size": 257, "num_classes": 2, "texts": 2, "encoder": ENCODER},
        "data": {
            "kind": "labelled_text",
            "folder": place,
            "train": ["train-pairs.jsonl"],
            "validation": ["validation-pairs.jsonl"],
            "second_text_field": "other",
            "tokeniser": place / "tokeniser",
            "batch": 6,
            "max_length": 16,
        },
    }


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "labelled_text": _labelled_text,
    "pairs": _pairs,
}


def small_task(kind: str, place: Path, **sections: dict[str, Any]) -> TrainingConfig:
    """A run of this kind in `place`/run, over data that is written if it is missing; sections override its keys."""
    place.mkdir(parents=True, exist_ok=True)
    ByteTokeniser().save(place / "tokeniser")
    values = {
        **RUNS[kind](place),
        "optimiser": {"learning_rate": 1e-2, "warmup_steps": 2},
        "run": {
            "folder": place / "run",
            "steps": 6,
            "dtype": "float32",
            "plot": False,
            "tensorboard": False,
            "log_every": 3,
            "evaluate_every": 3,
            "checkpoint_every": 3,
        },
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return TrainingConfig.model_validate(values)
