"""How a block of a file is read by all ranks: as the next part of one stream, or as sequences that stand alone."""

from typing import Protocol, final

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, MillionModel, TextEncoder
from dist_attn.rank.row_pieces import reduce_to_pieces
from dist_attn.rank.sequences import read_sequences
from dist_attn.rank_link.rows import GRAIN, sequence_length
from dist_attn.sharded import Algorithm, ShardedSequenceOps
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces
from dist_attn.wire.row_choice import MODEL_POOLING

__all__ = ["BlockReader", "SequenceReader", "StreamReader", "WholeReader"]


class BlockReader(Protocol):
    """Reads a text block by block; blocks end at multiples of `grain` or at the end of the text."""

    @property
    def grain(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def read(self, tokens_T: torch.Tensor, position: int) -> RowPieces:
        """The pieces of rows in this rank's part of the block that begins at `position`; all ranks have the block."""
        ...

    def carry_bytes(self) -> int:
        """What this rank contributed to the exchange of states for the last block."""
        ...


@final
class StreamReader:
    """One stream through a language model: the state goes on from block to block."""

    grain = GRAIN

    def __init__(
        self,
        comm: Communicator,
        model: LanguageModel,
        spec: RowSpec,
        *,
        exchange: Algorithm = "auto",
        deterministic: bool = False,
    ) -> None:
        self.dim = model.config.hidden_size
        self._comm, self._model, self._spec = comm, model, spec
        self._exchange, self._deterministic = exchange, deterministic
        self._state = model.initial_state(1)

    def read(self, tokens_T: torch.Tensor, position: int) -> RowPieces:
        """Rows of hidden states that have seen all that came before."""
        layout = SequenceLayout.even(len(tokens_T), self._comm.size, GRAIN)
        start, stop = layout.range(self._comm.rank)
        ops = ShardedSequenceOps(self._comm, layout, exchange=self._exchange, deterministic=self._deterministic)
        h_BLD, self._state = self._model.hidden(tokens_T[None, start:stop], ops, self._state)
        return reduce_to_pieces(h_BLD[0], position + start, 0, self._spec)

    def carry_bytes(self) -> int:
        """What this rank sent of its own states; of rings, all that it passed on."""
        return _carry_bytes(self._comm, self._exchange, self._deterministic)


@final
class SequenceReader:
    """Sequences through a text encoder: each lies on one rank, and ranks exchange nothing.

    Raises: InputError where the same bytes are asked for on any number of ranks: how many sequences a rank multiplies
        at once changes the last bits; or where rows are to be pooled otherwise than the model does.
    """

    def __init__(self, comm: Communicator, model: TextEncoder, spec: RowSpec, *, deterministic: bool = False) -> None:
        if deterministic:
            raise InputError("the rows of a text encoder cannot be deterministic over ranks; leave the option out")
        if spec.granularity != "token" and spec.pooling != MODEL_POOLING:
            raise InputError(f"this model pools by itself; pooling {spec.pooling!r} must be {MODEL_POOLING!r}")
        self.dim, self.grain = model.config.encoder.hidden_size, sequence_length(spec, model.config.text_tokens)
        self._comm, self._model, self._spec = comm, model, spec

    def read(self, tokens_T: torch.Tensor, position: int) -> RowPieces:
        """Rows of the sequences in this rank's part."""
        start, stop = SequenceLayout.even(len(tokens_T), self._comm.size, self.grain).range(self._comm.rank)
        if start == stop:
            return RowPieces(0, [], [], b"")
        return read_sequences(self._model, tokens_T[start:stop], position + start, 0, self._spec)

    def carry_bytes(self) -> int:
        """Nothing."""
        return 0


@final
class WholeReader:
    """Sequences of up to `max_tokens` through a million-scale model: each lies over all ranks, and stands alone.

    Raises: InputError where the same bytes are asked for on any number of ranks: rows come from sums in another order.
    """

    def __init__(self, comm: Communicator, model: MillionModel, spec: RowSpec, *, deterministic: bool = False) -> None:
        if deterministic:
            raise InputError("the rows of a million model cannot be deterministic over ranks; leave the option out")
        self.dim, self.grain = model.config.hidden_size, model.config.max_tokens
        self._comm, self._model, self._spec = comm, model, spec

    def read(self, tokens_T: torch.Tensor, position: int) -> RowPieces:
        """Rows of the vectors of all positions, kept tokens' own and those interpolated between them."""
        layout = SequenceLayout.even(len(tokens_T), self._comm.size, GRAIN)
        start, stop = layout.range(self._comm.rank)
        ops = ShardedSequenceOps(self._comm, layout)
        h_BLD = self._model.hidden(tokens_T[None, start:stop], ops)
        return reduce_to_pieces(h_BLD[0], position + start, 0, self._spec)

    def carry_bytes(self) -> int:
        """Nothing: no state goes on."""
        return 0


def _carry_bytes(comm: Communicator, exchange: Algorithm, deterministic: bool) -> int:
    """What this rank sent of its own states since the traffic was cleared; of rings, all that it passed on."""
    carries = [e for e in comm.traffic.events if e.label == "carry" and e.messages]
    if exchange.endswith("ring") and not deterministic:
        return sum(e.bytes_sent for e in carries)
    # A layer's state is sent first in what is launched, all gathered or, deterministic, passed on; later steps of an
    # exchange send what was made of it.
    first = [e for e in carries if deterministic or e.phase == "launch" or e.name == "all_gather"]
    return sum(e.bytes_sent // e.messages for e in first)
