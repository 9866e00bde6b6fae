"""The interface between the loop and what a run trains: numbered batches, a loss that ranks share, a validation.

A task never asks for its rank. It is given a `Share`, which says which rows of a batch and which tokens of a sequence
are worked on here, and the operations along that slice.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from dist_attn.checkpoints import load_any_model
from dist_attn.devices import compute_on
from dist_attn.mixers import redraw_pools
from dist_attn.models import Model, ModelConfig, build_model
from dist_attn.training.config import TrainingConfig
from dist_attn.training.mesh import Share


def rows_to_read(share: Share, total: int) -> tuple[slice, bool]:
    """The rows of a batch of `total` that are read here, and whether they count.

    A rank without rows reads the first one for nothing: a model whose parameters are sharded is used by all ranks
    equally often, since they gather its layers together.
    """
    own = share.rows(total)
    return (own, True) if own.start < own.stop else (slice(0, 1), False)


@dataclass(frozen=True)
class Criterion:
    """The validation metric that decides which checkpoint is best, and its better direction."""

    metric: str
    better: Literal["lower", "higher"]


class Task(ABC):
    """A model, its batches and its loss; everything about a step is a function of the step's number and of `carried`.

    The loop may shard the parameters of `model`: then they hold their values only inside `loss` and `validate`.
    """

    unit = "tokens"  # what the speed of the run is counted in
    sequences_per_row = 1  # that a row of a batch holds, as documents or side by side
    loss_unit = ""  # what the loss is counted in, for the axis of a picture
    matrices_by_name = True  # that the optimiser treats as such; else by their dimensions

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model = model
        self.batch = batch  # rows of one step over all ranks and micro-batches
        self.criterion: Criterion | None = None

    def prepare(self, step: int) -> None:
        """Prepare a step, before its first micro-batch."""
        return

    @abstractmethod
    def loss(self, step: int, rows: slice) -> Tensor:
        """This share's part of the loss of a step, over some of the rows of `Share.rows`, as a scalar with gradient.

        The sum over all micro-batches and all ranks is the loss of the whole batch, so it is divided by what the whole
        batch counts (`batch` x `segment` tokens, say) and not by what is counted here.
        """

    def carried(self) -> dict[str, Tensor]:
        """The tensors beside weights that the next step needs, this share's rows in dimension 0; for the checkpoint."""
        return {}

    def carry(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `carried` gave, as it stood in a checkpoint.

        Raises: ConfigError for tensors of another task.
        """
        return

    @abstractmethod
    def validate(self) -> dict[str, float | int]:
        """Compute metrics on held-out data, the same on every rank; empty without such data.

        The model is in evaluation mode, and no gradient is kept. `criterion` names the metric that decides.
        """

    def remarks(self, step: int, scores: Mapping[str, float | int]) -> list[str]:
        """The lines that tell a person about a validation after `step`; each once, until it is otherwise."""
        return []

    @abstractmethod
    def seen(self, steps: int) -> int:
        """Count the units (tokens) that `steps` steps read, over all ranks."""

    @abstractmethod
    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a model folder with these weights, those of the whole model; one rank does so."""


class ModelTask(Task):
    """A task that trains the model of a run's configuration, whose random features are drawn anew in every step."""

    def __init__(self, config: TrainingConfig, share: Share) -> None:
        self._config, self._share = config, share
        super().__init__(first_model(config.model, config.run.begin_from).to(share.device), config.data.batch)

    def prepare(self, step: int) -> None:
        redraw_pools(self.model, step)

    def _autocast(self) -> AbstractContextManager[object]:
        return compute_on(self._share.device, self._config.run.dtype).autocast()


def first_model(config: ModelConfig, begin_from: Path | None) -> Model:
    """Make the model of `config`, with the weights of the folder `begin_from` if there is one, in training mode.

    Raises: ConfigError where that folder is not of this model, nor of one that it takes weights of.
    """
    model = build_model(config)
    if begin_from is not None:
        model.begin_from(load_any_model(begin_from), begin_from)
    return model.train()
