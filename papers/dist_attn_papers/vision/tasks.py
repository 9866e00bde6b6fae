"""Tasks on images, whose patches may be cut across ranks: classification, and filling in hidden patches.

Letters: B images, H, W, C height, width and channels, T patches of an image, L of these on this rank, N numbers in a
patch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.ops.device import send
from dist_attn.training.classification import ClassificationTask, ExamplesTask
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion
from dist_attn_papers.vision.config import MaskedAutoencoderConfig, VisionClassifierConfig
from dist_attn_papers.vision.images import ImageDataConfig, ImageSet, read_image_sets
from dist_attn_papers.vision.model import MaskedAutoencoder, VisionClassifier, draw_mask


class _ImageTask(ExamplesTask[ImageSet]):
    """A task over images, with classes where the model has some."""

    unit = called = "images"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = cast(ImageDataConfig, config.data)
        model = cast(VisionClassifierConfig | MaskedAutoencoderConfig, config.model)
        classes = model.num_classes if isinstance(model, VisionClassifierConfig) else None
        self._image, self._sets = model.image, read_image_sets(data, model.image, classes)
        criterion = Criterion("validation_loss", "lower") if classes is None else Criterion("accuracy", "higher")
        super().__init__(config, share, self._sets.train, self._sets.validation, criterion)

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        model = cast(VisionClassifier | MaskedAutoencoder, self.model)
        save_model(model, folder, half=True, facts={**self._sets.facts(), **facts}, weights=weights)


class VisionTask(ClassificationTask[ImageSet], _ImageTask):
    """A task of classifying images.

    Reference: Introduction to Transformers, Sec. 4.
    """

    model: VisionClassifier
    loss_unit = "nats per image"

    def _classify(self, examples: ImageSet, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        assert examples.classes_N is not None  # read_image_sets has read them
        weight = self.model.projection.weight
        patches_BTN = self.model.prepare(examples.pixels(numbers).to(weight.dtype))
        total, device = patches_BTN.shape[1], self._share.device
        own_BLN = send(patches_BTN[:, self._share.tokens(total)], device)
        with self._autocast():
            logits_BC = self.model(own_BLN, self._share.ops(total))
        return logits_BC, send(torch.from_numpy(examples.classes_N[numbers]), device)


HIDDEN_SHARE = 0.75
_VALIDATION_DRAW = -1  # in the place of a step's number


class MaskedAutoencoderTask(_ImageTask):
    """A task of the mean squared error over hidden patches; validated on held-out images, under masks that stay.

    Masks are a function of seed and step, drawn for the whole batch before it is cut over ranks.

    Reference: Introduction to Transformers, Sec. 4; He et al. 2022 (three patches of four are hidden).
    """

    model: MaskedAutoencoder
    loss_unit = "squared error"

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = self._numbers(step)
        mean = self._mean_error(self._train, numbers[rows], self._mask(step, 0, len(numbers))[rows])
        # Every image hides equally many patches, so the mean over the batch is that of its parts, by their rows.
        return mean * (len(numbers[rows]) / self.batch * self._share.replica_weight)

    def validate(self) -> dict[str, float | int]:
        images = self._validation
        if images is None:
            return {}
        error = 0.0
        for numbers, own, counts in self._validation_batches(images):
            mask_BT = self._mask(_VALIDATION_DRAW, numbers.start, len(numbers))[own]
            mean = float(self._mean_error(images, np.array(numbers)[own], mask_BT))
            if counts:
                error += mean * (own.stop - own.start)
        total = self._share.sum(torch.tensor([error * self._share.replica_weight], dtype=torch.float64, device="cpu"))
        return {"validation_loss": float(total) / len(images), "images": len(images)}

    def _mask(self, step: int, first: int, count: int) -> Tensor:
        """Draw the hidden patches of `count` images, [count, T]."""
        words = np.random.SeedSequence((self._config.run.seed, step + 1, first)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]) >> 1)
        hidden = self._config.objective.hidden_share
        return draw_mask(count, self._image, HIDDEN_SHARE if hidden is None else hidden, generator)

    def _mean_error(self, images: ImageSet, numbers: NDArray[np.int64], mask_BT: Tensor) -> Tensor:
        """Compute the model's loss on some images, equal on all ranks of these rows."""
        patches_BTN = self.model.prepare(images.pixels(numbers).to(self.model.projection.weight.dtype))
        total, device = patches_BTN.shape[1], self._share.device
        own = self._share.tokens(total)
        own_BLN, mask_BL = send(patches_BTN[:, own], device), send(mask_BT[:, own], device)
        with self._autocast():
            return self.model.loss(own_BLN, mask_BL, self._share.ops(total))
