"""Masked auto-encoding: patches of images that are hidden anew at every step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.mixers import redraw_pools
from dist_attn.models import MaskedAutoencoder, MaskedAutoencoderConfig
from dist_attn.models.vision import draw_mask
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.config import ImageDataConfig
from dist_attn.training.datasets.order import check_enough, examples_of_step
from dist_attn.training.first_model import first_model
from dist_attn.training.image_sets import ImageSet, read_image_sets
from dist_attn.training.task import Criterion, Share, Task, rows_to_read

__all__ = ["MaskedAutoencoderTask"]

HIDDEN_SHARE = 0.75
_VALIDATION_DRAW = -1  # in the place of a step's number


class MaskedAutoencoderTask(Task):
    """The mean squared error over hidden patches; validated by the same on held-out images, under masks that stay.

    Masks are a function of seed and step, drawn for the whole batch before it is cut over ranks.

    Reference: Introduction to Transformers, Sec. 4; He et al. 2022 (three patches of four are hidden).
    """

    model: MaskedAutoencoder
    unit = "images"
    loss_unit = "squared error"

    def __init__(self, config: TrainingConfig, share: Share) -> None:
        data, model = cast(ImageDataConfig, config.data), cast(MaskedAutoencoderConfig, config.model)
        self._config, self._share, self._image = config, share, model.image
        self._sets = read_image_sets(data, model.image, None)
        check_enough(len(self._sets.train), data.batch, "images")
        super().__init__(first_model(model, config.run.begin_from).to(share.device), data.batch)
        self.criterion = None if self._sets.validation is None else Criterion("validation_loss", "lower")

    def prepare(self, step: int) -> None:
        redraw_pools(self.model, step)

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = examples_of_step(step, self.batch, len(self._sets.train), self._config.run.seed)
        mean = self._mean_error(self._sets.train, numbers[rows], self._mask(step, 0, len(numbers))[rows])
        # Every image hides equally many patches, so the mean over the batch is that of its parts, by their rows.
        return mean * (len(numbers[rows]) / self.batch * self._share.replica_weight)

    def validate(self) -> dict[str, float | int]:
        images = self._sets.validation
        if images is None:
            return {}
        error = 0.0
        for start in range(0, len(images), self.batch):
            numbers = np.arange(start, min(start + self.batch, len(images)))
            own, counts = rows_to_read(self._share, len(numbers))
            mask_BT = self._mask(_VALIDATION_DRAW, start, len(numbers))[own]
            mean = float(self._mean_error(images, numbers[own], mask_BT))
            if counts:
                error += mean * (own.stop - own.start)
        total = self._share.sum(torch.tensor([error * self._share.replica_weight], dtype=torch.float64))
        return {"validation_loss": float(total) / len(images), "images": len(images)}

    def seen(self, steps: int) -> int:
        return steps * self.batch

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        save_model(self.model, folder, half=True, facts={**self._sets.facts(), **facts}, weights=weights)

    def _mask(self, step: int, first: int, count: int) -> Tensor:
        """Which patches of `count` images are hidden, [count, T]."""
        words = np.random.SeedSequence((self._config.run.seed, step + 1, first)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]) >> 1)
        hidden = self._config.objective.hidden_share
        return draw_mask(count, self._image, HIDDEN_SHARE if hidden is None else hidden, generator)

    def _mean_error(self, images: ImageSet, numbers: NDArray[np.int64], mask_BT: Tensor) -> Tensor:
        """The model's loss on some images, equal on all ranks of these rows."""
        patches_BTN = self.model.prepare(images.pixels(numbers).to(self.model.projection.weight.dtype))
        total, device = patches_BTN.shape[1], self._share.device
        own = self._share.tokens(total)
        own_BLN, mask_BL = patches_BTN[:, own].to(device), mask_BT[:, own].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.run.bf16):
            return self.model.loss(own_BLN, mask_BL, self._share.ops(total))
