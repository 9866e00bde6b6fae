"""A mesh of ranks: rows of the batch are divided along its data axis, tokens of every sequence along its sequence axis.

Rank r stands at data index r // S and sequence index r % S, where S ranks share a sequence.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import Self, TypeVar, final

import torch
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.devices import ON_CPU
from dist_attn.errors import ConfigError, DistAttnError, EngineError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.finite import checked_if_asked
from dist_attn.sharded import CacheKept, ShardedSequenceOps

__all__ = ["Mesh", "Share", "mesh_shape"]

Result = TypeVar("Result")


def mesh_shape(size: int, data_ranks: int | None, sequence_ranks: int | None) -> tuple[int, int]:
    """Settle the number of ranks along the data and the sequence axis; what is not given follows from `size`.

    With neither given all ranks divide rows: that exchanges gradients alone.

    Raises: ConfigError where the product is not the number of ranks that were started.
    """
    data = data_ranks or size // (sequence_ranks or 1)
    sequence = sequence_ranks or (size // data if data_ranks else 1)
    if data * sequence != size:
        asked_for = [f"run.data_ranks = {data_ranks}"] if data_ranks else []
        asked_for += [f"run.sequence_ranks = {sequence_ranks}"] if sequence_ranks else []
        raise ConfigError(
            f"{' and '.join(asked_for)} do not make a mesh of the {size} process{'es' if size > 1 else ''} that "
            f"{'were' if size > 1 else 'was'} started; start as many as their product, or leave one of them out"
        )
    return data, sequence


@final
class Mesh:
    """All ranks of a run, and this one's place among them; a context that closes the groups it has made.

    Making one is a call of all ranks.
    """

    def __init__(
        self,
        world: Communicator,
        data_ranks: int | None = None,
        sequence_ranks: int | None = None,
        device: torch.device = ON_CPU.device,
    ) -> None:
        self.world = world
        self.device = device
        self.data_ranks, self.sequence_ranks = mesh_shape(world.size, data_ranks, sequence_ranks)
        self.data_index, self.sequence_index = divmod(world.rank, self.sequence_ranks)
        self._groups = ExitStack()
        # If one axis has all the ranks, the whole group is that axis.
        self._data = self._sequence = world
        if self.data_ranks > 1 and self.sequence_ranks > 1:
            self._data = self._groups.enter_context(world.split(self.sequence_index))
            self._sequence = self._groups.enter_context(world.split(self.data_index))

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the files and speaks for all."""
        return self.world.rank == 0

    def share(self) -> "Share":
        """Make the share of every batch on which this rank works."""
        axis = self._sequence if self.sequence_ranks > 1 else None
        return Share(self.device, self.world, (self.data_index, self.data_ranks), axis)

    def micro_batches(self, batch: int, count: int) -> list[slice]:
        """Cut the rows of this rank into `count` parts, none of them empty, as every rank has them.

        Raises: ConfigError where there are not enough rows.
        """
        if batch < self.data_ranks * count:
            raise ConfigError(
                f"data.batch is {batch}; {self.data_ranks} data ranks with {count} micro-batches each need at least "
                f"{self.data_ranks * count} rows"
            )
        rows = self.share().rows(batch)
        cuts = SequenceLayout.even(rows.stop - rows.start, count).cuts
        return [slice(rows.start + a, rows.start + b) for a, b in pairwise(cuts)]

    def gather_rows(self, own: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
        """Gather the tensors of all rows of a batch from each data rank's, in dimension 0; every rank calls it."""
        if self.data_ranks == 1:
            return dict(own)
        lengths = SequenceLayout.even(batch, self.data_ranks).lengths
        whole = {}
        for name, tensor in own.items():
            padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
            padded[: tensor.shape[0]] = tensor
            gathered = self._data.all_gather(padded, label="carried state")
            whole[name] = torch.cat([rows[:n] for rows, n in zip(gathered, lengths, strict=True)])
        return whole

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work` and return its result; where it fails on any rank it fails on all, with words about the first.

        `work` exchanges nothing.

        Raises: where rank 0 fails too, which speaks for all, each rank's own error; else EngineError naming the rank.
        """
        if self.world.size == 1:
            return work()
        try:
            result, failure = work(), None
        except (DistAttnError, OSError) as error:
            failure = error
        said = self.world.all_gather_text("" if failure is None else f"{failure} ", label="together")
        if failure is not None and said[0].strip():
            raise failure
        failed = next((rank for rank, words in enumerate(said) if words.strip()), None)
        if failed is not None:
            raise EngineError(f"rank {failed} of {self.world.size}: {said[failed].strip()}") from failure
        return result

    def broadcast_weights(self, model: torch.nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0."""
        if self.world.size > 1:
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    tensor.copy_(self.world.broadcast(tensor, 0, label=name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._groups.__exit__(kind, error, trace)


@final
class Share:
    """The part of every batch that is worked on here; on all ranks together it is the whole batch, once.

    `data` says which part of the rows it has of how many, `sequence` are the ranks that cut every sequence. Without
    either, it is the share of a process that works alone: everything.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        world: Communicator | None = None,
        data: tuple[int, int] = (0, 1),
        sequence: Communicator | None = None,
    ) -> None:
        self.device = torch.device(device)
        """The device of the model and its batches."""
        self.replica_weight = 1.0 / (1 if sequence is None else sequence.size)
        """The weight of a value that all ranks of these rows compute alike, such as the loss of a pooled vector.

        One over the number of ranks that a sequence is cut over, so that their sum counts it once.
        """
        self._world = LocalCommunicator() if world is None else world
        self._data, self._sequence = data, sequence

    def rows(self, total: int) -> slice:
        """The rows of a batch of `total` that are worked on here; there may be none."""
        index, ranks = self._data
        return slice(*SequenceLayout.even(total, ranks).range(index))

    def tokens(self, total: int) -> slice:
        """The tokens of sequences of `total` tokens that are worked on here; there may be none."""
        return slice(*self._layout(total).range(self._sequence.rank)) if self._sequence else slice(0, total)

    def ops(
        self,
        total: int,
        memory: int | None = None,
        *,
        carried: bool = False,
        documents: tuple[int, ...] | None = None,
    ) -> SequenceOps:
        """Make operations along sequences of `total` tokens, cut as `tokens` says; `memory` is the length attended to.

        With `carried` the state after the tokens is whole on every rank, key-value caches too, so that it can go into
        a checkpoint. `documents` are where packed documents start, on all ranks together.
        """
        if self._sequence is None:
            return checked_if_asked(LocalSequenceOps(documents))
        memory_layout = None if memory is None else self._layout(memory)
        cache: CacheKept = "whole" if carried else "spread"
        ops = ShardedSequenceOps(self._sequence, self._layout(total, documents), memory_layout, cache=cache)
        return checked_if_asked(ops, self.tokens(total).start)

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum a few numbers over all ranks, such as a loss and what it counts; every rank calls it."""
        return self._world.all_reduce_sum(values_N.detach(), label="sums of shares")

    def lengthwise(self) -> "Share":
        """Make the share of all ranks along the sequence with every row on each, for one long text as in validation."""
        return Share(self.device, self._world, sequence=self._world if self._world.size > 1 else None)

    def _layout(self, total: int, documents: tuple[int, ...] | None = None) -> SequenceLayout:
        return SequenceLayout.even(total, 1 if self._sequence is None else self._sequence.size, documents=documents)
