"""A small run of contrastive training over books whose chapters are easy to tell apart."""

from pathlib import Path
from typing import Any

import numpy as np

from dist_attn.training import TrainingConfig
from dist_attn.training.config import ContrastConfig
from tests.support.training import small_run

__all__ = ["CONTRAST", "book", "chapters_run"]

CONTRAST = ContrastConfig(chapters=4, books=2, validation_window=16, language_weight=0.5)


def book(letters: bytes) -> bytes:
    """A chapter for each letter, which alternates with capitals that change all the time and mean nothing."""
    draw = np.random.default_rng(letters[0])
    text = b""
    for number, letter in enumerate(letters):
        capitals = np.repeat(draw.choice(list(b"ABCDEFGH"), 7), 5)
        text += b"CHAPTER %d\n" % number + b"".join(bytes([letter, *4 * [capital]]) for capital in capitals) + b"\n"
    return text


def chapters_run(place: Path, **run: Any) -> TrainingConfig:
    """`small_run` with a section [contrast], over two books and a third that is held out."""
    config = small_run(place, dtype="float32", **run)
    for name, letters in (("first.txt", b"abcdef"), ("second.txt", b"ghijkl"), ("held_out.txt", b"cdefgh")):
        (place / name).write_bytes(book(letters))
    update = {
        "train": ("first.txt", "second.txt"),
        "validation": "held_out.txt",
        "validation_bytes": 900,
        "segment": 16,
    }
    values = config.model_dump(mode="json") | {"contrast": CONTRAST.model_dump()}
    values["data"] |= update
    return TrainingConfig.model_validate(values)
