"""transformers' Trainer, and TRL's, over texts that are cut across ranks.

    class LongTextTrainer(TrainOverRanks, SFTTrainer): ...

    trainer = LongTextTrainer(model=model, args=args, train_dataset=texts, slices=4)  # ranks for each text

Ranks of one text are given the same batches; gradients come together as the Trainer has them do: averaged over all.
"""

from typing import Any

import torch

from dist_attn.adapters.context_parallel import context_parallel
from dist_attn.comm.torch_dist import communicator_of
from dist_attn.errors import ConfigError

__all__ = ["TrainOverRanks"]


class TrainOverRanks:
    """A mixin, named before the Trainer that it changes; `slices` is the number of ranks of each text, by default all.

    Raises: ConfigError for slices that do not divide the ranks, for evaluation that wants logits, and for datasets
        without a length.
    """

    def __init__(self, *args: Any, slices: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        world = communicator_of(None)
        self._slices = world.size if slices is None else slices
        if self._slices < 1 or world.size % self._slices:
            raise ConfigError(f"slices is {slices}; needed is a divisor of {world.size}, the number of ranks")
        comm = world if self._slices == world.size else world.split(world.rank // self._slices)
        self._ranks, self._row = world.size, world.rank // self._slices
        self.parallel = context_parallel(trainer.model, comm, reduction="mean")

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader: Any = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        if self._ranks > 1:
            batches: Any = loader.batch_sampler
            if not hasattr(batches, "process_index"):
                raise ConfigError("the dataset has no length; ranks of one text need one whose items are numbered")
            batches.num_processes, batches.process_index = self._ranks // self._slices, self._row
        return loader

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of this row's texts, whose gradient is this rank's share for wrappers that average."""
        trainer: Any = self
        count: Any = num_items_in_batch
        if count is not None and trainer.args.average_tokens_across_devices:
            count = count / self._ranks  # of a row on average: it was added up over all ranks
        part = self.parallel.shard({**inputs, "num_items_in_batch": count})
        outputs = model(**part)
        if return_outputs and not trainer.args.prediction_loss_only:
            raise ConfigError("over ranks evaluation gives the loss alone; set prediction_loss_only=True")
        return (outputs.loss, outputs) if return_outputs else outputs.loss
