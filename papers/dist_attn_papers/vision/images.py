"""Images as arrays (`.npy` or `.npz`, [N, H, W] or [N, H, W, C]) and as a task takes them, with classes or without."""

import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError  # of numpy, which reads a header as Python
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from dist_attn.errors import ConfigError
from dist_attn.training.datasets.config import FileDataConfig, register_data
from dist_attn.training.datasets.examples import Label, LabelNames
from dist_attn_papers.vision.config import ImageConfig

_STATISTICS_IMAGES = 10_000
_ONE_HEADER = threading.Lock()


class ImageDataConfig(FileDataConfig):
    """Images in `.npz` or `.npy` files (relative to `folder`), [N, H, W] or [N, H, W, C], and for a classifier labels.

    Labels are the array `labels_key` of the `.npz` file, or a `.npy` file of their own.
    """

    kind: Literal["images"] = "images"
    train: Path
    train_labels: Path | None = None
    validation: Path | None = None
    validation_labels: Path | None = None
    images_key: str = "images"
    labels_key: str = "labels"
    batch: int = Field(default=64, ge=1)

    @property
    def train_files(self) -> tuple[Path, Path]:
        """Images and labels, found from `folder`."""
        return self.found(self.train), self.found(self.train_labels or self.train)

    @property
    def validation_files(self) -> tuple[Path, Path] | None:
        """Images and labels, found from `folder`."""
        if self.validation is None:
            return None
        return self.found(self.validation), self.found(self.validation_labels or self.validation)


register_data(ImageDataConfig)


@dataclass(frozen=True)
class PixelScale:
    """The mean and the deviation of each channel, in the arrays' own units: a model sees (pixel - mean) / deviation."""

    mean_C: tuple[float, ...]
    deviation_C: tuple[float, ...]

    @classmethod
    def of(cls, images_NHWC: NDArray[np.generic]) -> "PixelScale":
        """Measure (the first 10,000) images in float64; a deviation of 0 is taken as 1."""
        pixels_NC = images_NHWC[:_STATISTICS_IMAGES].reshape(-1, images_NHWC.shape[3]).astype(np.float64)
        deviation_C = pixels_NC.std(axis=0)
        return cls(tuple(pixels_NC.mean(axis=0).tolist()), tuple(np.where(deviation_C > 0, deviation_C, 1).tolist()))

    def __call__(self, images_BHWC: NDArray[np.generic]) -> torch.Tensor:
        """Scale images for a model: [B, C, H, W] float32."""
        scaled = (images_BHWC.astype(np.float64) - self.mean_C) / self.deviation_C
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), dtype=np.float32))


def read_images(path: Path, key: str, config: ImageConfig) -> NDArray[np.generic]:
    """Read the images of a file, [N, H, W, C]; a `.npy` file is mapped to memory.

    Raises: ConfigError for a file that is none, or that holds images of another size, or none, or no finite numbers.
    """
    array = _array(path, key)
    if array.dtype.kind not in "uif":
        raise ConfigError(f"{path} holds {array.dtype}; images are whole numbers (uint8) or floats")
    array = array[..., None] if array.ndim == 3 else array
    size = (config.height, config.width, config.channels)
    if array.ndim != 4 or array.shape[1:] != size:
        raise ConfigError(
            f"{path} holds an array {list(array.shape)}; model.image needs [N, {config.height}, {config.width}"
            + (f", {config.channels}]" if config.channels > 1 else "] or [N, H, W, 1]")
        )
    if not len(array):
        raise ConfigError(f"{path} holds no images; give at least one")
    if array.dtype.kind == "f":
        for start in range(0, len(array), 1024):
            bad = ~np.isfinite(array[start : start + 1024]).all(axis=(1, 2, 3))
            if bad.any():
                raise ConfigError(f"{path}: image {start + int(bad.argmax())} has NaN or infinite pixels; take it out")
    return array


def read_labels(path: Path, key: str, count: int) -> tuple[Label, ...]:
    """Read the label of each of `count` images: whole numbers or words.

    Raises: ConfigError for a file that is none, or another number of labels.
    """
    array = _array(path, key)
    if array.dtype.kind not in "uiU" or array.ndim != 1:
        raise ConfigError(f"{path}: labels {list(array.shape)} of {array.dtype}; needed is a whole number or word each")
    if len(array) != count:
        raise ConfigError(f"{path} has {len(array)} labels for {count} images; there must be one for each")
    return tuple(array.tolist())


def class_numbers(labels: tuple[Label, ...], names: LabelNames, path: Path) -> NDArray[np.int64]:
    """The class of each image.

    Raises: ConfigError for a label that is not among the names.
    """
    return np.array([names.number(label, f"{path}, image {i}") for i, label in enumerate(labels)], dtype=np.int64)


def _array(path: Path, key: str) -> NDArray[np.generic]:
    array: NDArray[np.generic]
    try:
        if path.suffix != ".npz":
            array = np.lib.format.open_memmap(path, mode="r")
            return array
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if key not in arrays.files:
                raise ConfigError(f"{path} has no array {key!r}, only {', '.join(arrays.files)}; name it in [data]")
            # The header is parsed by Python's ast, which in CPython 3.11 fails now and then in several threads at once.
            with _ONE_HEADER:
                array = arrays[key]
            return array
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, SyntaxError, TokenError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read as .npy or .npz: {reason}") from None


@dataclass(frozen=True)
class ImageSet:
    """Images and, for a classifier, their classes."""

    images_NHWC: NDArray[np.generic]
    classes_N: NDArray[np.int64] | None
    scale: PixelScale

    def __len__(self) -> int:
        return len(self.images_NHWC)

    def pixels(self, numbers: NDArray[np.int64]) -> Tensor:
        """Scale some of the images for a model: [B, C, H, W]."""
        return self.scale(self.images_NHWC[numbers])


@dataclass(frozen=True)
class ImageSets:
    """The images to train on, held-out ones, and the names of their classes."""

    train: ImageSet
    validation: ImageSet | None
    labels: LabelNames | None

    def facts(self) -> dict[str, Any]:
        """The facts that are needed to give the trained model other images."""
        scale = self.train.scale
        facts: dict[str, Any] = {"pixel_mean": list(scale.mean_C), "pixel_deviation": list(scale.deviation_C)}
        return facts if self.labels is None else {"labels": list(self.labels.names), **facts}


def read_image_sets(data: ImageDataConfig, image: ImageConfig, num_classes: int | None) -> ImageSets:
    """Read the images that [data] names, with labels where `num_classes` says that there are classes.

    Raises: ConfigError for files that are missing, unusable, or do not fit the model.
    """
    images = read_images(data.train_files[0], data.images_key, image)
    scale, names, classes = PixelScale.of(images), None, None
    if num_classes is not None:
        labels = read_labels(data.train_files[1], data.labels_key, len(images))
        names = LabelNames.of(labels)
        names.check(num_classes)
        classes = class_numbers(labels, names, data.train_files[1])
    train = ImageSet(images, classes, scale)
    held_out = None if data.validation_files is None else _held_out(data, data.validation_files, image, names, scale)
    return ImageSets(train, held_out, names)


def _held_out(
    data: ImageDataConfig, files: tuple[Path, Path], image: ImageConfig, names: LabelNames | None, scale: PixelScale
) -> ImageSet:
    images = read_images(files[0], data.images_key, image)
    if names is None:
        return ImageSet(images, None, scale)
    labels = read_labels(files[1], data.labels_key, len(images))
    return ImageSet(images, class_numbers(labels, names, files[1]), scale)
