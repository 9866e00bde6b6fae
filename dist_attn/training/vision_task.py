"""Classification of images, whose patches may be cut across ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.mixers import redraw_pools
from dist_attn.models import VisionClassifier, VisionClassifierConfig
from dist_attn.training.classification import Tally, cross_entropy
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.config import ImageDataConfig
from dist_attn.training.datasets.order import check_enough, examples_of_step
from dist_attn.training.first_model import first_model
from dist_attn.training.image_sets import ImageSet, read_image_sets
from dist_attn.training.task import Criterion, Share, Task, rows_to_read

__all__ = ["VisionTask"]


class VisionTask(Task):
    """The mean cross entropy of the classes of a batch of images; validated by accuracy.

    Reference: Introduction to Transformers, Sec. 4.
    """

    model: VisionClassifier
    unit = "images"
    loss_unit = "nats per image"

    def __init__(self, config: TrainingConfig, share: Share) -> None:
        data, model = cast(ImageDataConfig, config.data), cast(VisionClassifierConfig, config.model)
        self._config, self._share = config, share
        self._sets = read_image_sets(data, model.image, model.num_classes)
        check_enough(len(self._sets.train), data.batch, "images")
        super().__init__(first_model(model, config.run.begin_from).to(share.device), data.batch)
        self.criterion = None if self._sets.validation is None else Criterion("accuracy", "higher")

    def prepare(self, step: int) -> None:
        redraw_pools(self.model, step)

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = examples_of_step(step, self.batch, len(self._sets.train), self._config.run.seed)[rows]
        logits_BC, classes_B = self._classify(self._sets.train, numbers)
        smoothing = self._config.objective.label_smoothing
        return cross_entropy(logits_BC, classes_B, smoothing) * (self._share.replica_weight / self.batch)

    def validate(self) -> dict[str, float | int]:
        images = self._sets.validation
        if images is None:
            return {}
        tally = Tally()
        for start in range(0, len(images), self.batch):
            own, counts = rows_to_read(self._share, min(self.batch, len(images) - start))
            scored = self._classify(images, np.arange(start + own.start, start + own.stop))
            if counts:
                tally.add(*scored)
        return tally.scores(self._share)

    def seen(self, steps: int) -> int:
        return steps * self.batch

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        save_model(self.model, folder, half=True, facts={**self._sets.facts(), **facts}, weights=weights)

    def _classify(self, images: ImageSet, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Logits and classes of some images."""
        assert images.classes_N is not None  # read_image_sets has read them
        weight = self.model.projection.weight
        patches_BTN = self.model.prepare(images.pixels(numbers).to(weight.dtype))
        total, device = patches_BTN.shape[1], self._share.device
        own_BLN = patches_BTN[:, self._share.tokens(total)].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.run.bf16):
            logits_BC = self.model(own_BLN, self._share.ops(total))
        return logits_BC, torch.from_numpy(images.classes_N[numbers]).to(device)
