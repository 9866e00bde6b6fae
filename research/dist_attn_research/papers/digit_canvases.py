"""Handwritten digits, enlarged, at random places of larger canvases: images for a vision task."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError

__all__ = ["CANVAS", "SCALE", "make_canvases", "read_digits", "split_digits"]

# Of 48 pixels on 64, at any of 17 x 17 places: small models that begin from nothing learn no smaller ones so fast.
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
    canvases, labels = zip(*_canvases(digits, count, np.random.default_rng(seed)), strict=True)
    with path.open("wb") as file:
        np.savez_compressed(file, images=np.stack(canvases), labels=np.array(labels))


def _canvases(digits: Digits, count: int, draw: np.random.Generator) -> Iterator[tuple[NDArray[np.uint8], np.int64]]:
    images_NHW, shown_N = digits
    for _ in range(count):
        canvas_HW = np.zeros((CANVAS, CANVAS), np.uint8)
        number = draw.integers(len(images_NHW))
        large_HW = np.kron(images_NHW[number], np.ones((SCALE, SCALE), np.uint8))
        row, column = draw.integers(0, CANVAS - len(large_HW) + 1, 2)
        canvas_HW[row : row + len(large_HW), column : column + len(large_HW)] = large_HW
        yield canvas_HW, shown_N[number]
