"""Images as a vision task takes them: scaled by what the training images are like, with classes or without."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.models import ImageConfig
from dist_attn.training.datasets.config import ImageDataConfig
from dist_attn.training.datasets.images import Images, PixelScale, class_numbers, read_images, read_labels
from dist_attn.training.datasets.labels import LabelNames

__all__ = ["ImageSet", "ImageSets", "read_image_sets"]


@dataclass(frozen=True)
class ImageSet:
    """Images and, for a classifier, their classes."""

    images: Images
    classes_N: NDArray[np.int64] | None
    scale: PixelScale

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, numbers: NDArray[np.int64]) -> Tensor:
        """Some of the images as a model takes them, [B, C, H, W]."""
        return self.scale(self.images.array_NHWC[numbers])


@dataclass(frozen=True)
class ImageSets:
    """The images to train on, held-out ones, and the names of their classes."""

    train: ImageSet
    validation: ImageSet | None
    labels: LabelNames | None

    def facts(self) -> dict[str, Any]:
        """What somebody needs to know who gives the trained model images of their own."""
        scale = self.train.scale
        facts: dict[str, Any] = {"pixel_mean": list(scale.mean_C), "pixel_deviation": list(scale.deviation_C)}
        return facts if self.labels is None else {"labels": list(self.labels.names), **facts}


def read_image_sets(data: ImageDataConfig, image: ImageConfig, num_classes: int | None) -> ImageSets:
    """The images that [data] names, with labels where `num_classes` says that there are classes.

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
