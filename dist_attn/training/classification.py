"""Tasks over numbered examples, such as labelled ones: their order, their losses over ranks, and their validation.

Letters: N examples, C classes.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.examples import check_enough, examples_of_step
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion, ModelTask, rows_to_read

Examples = TypeVar("Examples", bound=Sized)


def cross_entropy(logits_NC: Tensor, classes_N: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The sum over the examples, in float32 at least; class -100, torch's `ignore_index`, counts for nothing."""
    wide_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
    return F.cross_entropy(wide_NC, classes_N, reduction="sum", label_smoothing=label_smoothing)


@dataclass
class Tally:
    """The examples scored here so far: the sum of their losses, how many were right, and their number."""

    loss: float = 0.0
    right: int = 0
    examples: int = 0

    def add(self, logits_NC: Tensor, classes_N: Tensor) -> None:
        """Count the scores of some examples."""
        self.loss += float(cross_entropy(logits_NC, classes_N))
        self.right += int((logits_NC.argmax(dim=1) == classes_N).sum())
        self.examples += len(classes_N)

    def scores(self, share: Share) -> dict[str, float | int]:
        """Compute accuracy and mean loss over all ranks, each example once; a call of every rank."""
        own_N = torch.tensor([self.loss, self.right, self.examples], dtype=torch.float64, device="cpu").to(share.device)
        loss, right, examples = share.sum(own_N * share.replica_weight).tolist()
        examples = round(examples)  # thirds that were added up
        return {"accuracy": right / examples, "validation_loss": loss / examples, "examples": examples}


class ExamplesTask(ModelTask, Generic[Examples]):
    """A task over examples that have numbers: each comes once an epoch, in an order drawn from the run's seed."""

    called = "examples"

    def __init__(
        self, config: TrainingConfig, share: Share, train: Examples, validation: Examples | None, criterion: Criterion
    ) -> None:
        check_enough(len(train), config.data.batch, self.called)
        super().__init__(config, share)
        self._train, self._validation = train, validation
        self.criterion = None if validation is None else criterion

    def seen(self, steps: int) -> int:
        return steps * self.batch

    def _numbers(self, step: int) -> NDArray[np.int64]:
        """The numbers of the examples in the whole batch of a step, [batch]."""
        return examples_of_step(step, self.batch, len(self._train), self._config.run.seed)

    def _validation_batches(self, examples: Examples) -> Iterator[tuple[range, slice, bool]]:
        """Cut the examples into batches: the numbers of each, the slice of them read here, and whether it counts."""
        for start in range(0, len(examples), self.batch):
            numbers = range(start, min(start + self.batch, len(examples)))
            yield numbers, *rows_to_read(self._share, len(numbers))


class ClassificationTask(ExamplesTask[Examples]):
    """A task whose loss is the mean cross entropy of the classes of a batch; validated by accuracy."""

    @abstractmethod
    def _classify(self, examples: Examples, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Compute logits [N, C] and classes [N] of some examples, equal on all ranks that share them."""

    def loss(self, step: int, rows: slice) -> Tensor:
        logits_NC, classes_N = self._classify(self._train, self._numbers(step)[rows])
        smoothing = self._config.objective.label_smoothing
        return cross_entropy(logits_NC, classes_N, smoothing) * (self._share.replica_weight / self.batch)

    def validate(self) -> dict[str, float | int]:
        if self._validation is None:
            return {}
        tally = Tally()
        for numbers, own, counts in self._validation_batches(self._validation):
            scored = self._classify(self._validation, np.array(numbers)[own])
            if counts:
                tally.add(*scored)
        return tally.scores(self._share)
