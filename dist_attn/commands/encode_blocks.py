"""The loop of an encoding: rank 0's tokens to every rank, hidden states there, the pieces of rows back to rank 0."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import final

import numpy as np
import torch

from dist_attn.comm import Communicator
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.figures import GRAIN
from dist_attn.models import Model, SequenceModel, StreamEncoder, StreamingModel, TextEncoder
from dist_attn.ops.device import send
from dist_attn.rank.row_pieces import reduce_to_pieces
from dist_attn.rank.sequence_executor import read_sequences, row_pieces, vectors_together
from dist_attn.rank_link.rows import sequence_length
from dist_attn.sharded import Algorithm, ShardedSequenceOps
from dist_attn.text.cuts import marked_ends, unmarked
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces
from dist_attn.wire.specs import MODEL_POOLING


class BlockReader(ABC):
    """Reads a text block by block; blocks end at multiples of `grain` or at the end of the text."""

    grain: int
    dim: int
    device: torch.device

    @abstractmethod
    def read(self, tokens_T: torch.Tensor, position: int, ends: Sequence[int] = ()) -> RowPieces:
        """The pieces of rows in this rank's part of the block that begins at `position`; all ranks have the block.

        Marked rows end at the positions `ends` of the block.
        """

    def carry_bytes(self) -> int:
        """The bytes this rank contributed to the last block's exchange of states: none where no state goes on."""
        return 0


@final
class StreamReader(BlockReader):
    """One stream through a language model or a stream encoder: the state goes on from block to block."""

    grain = GRAIN

    def __init__(
        self,
        comm: Communicator,
        model: StreamingModel,
        spec: RowSpec,
        *,
        exchange: Algorithm = "auto",
        deterministic: bool = False,
    ) -> None:
        self.dim = model.hidden_size
        self.device = model.device
        self._comm, self._model, self._spec = comm, model, spec
        self._exchange, self._deterministic = exchange, deterministic
        self._state = model.initial_state(1)

    def read(self, tokens_T: torch.Tensor, position: int, ends: Sequence[int] = ()) -> RowPieces:
        """Rows of hidden states that have seen all that came before."""
        layout = SequenceLayout.even(len(tokens_T), self._comm.size, GRAIN)
        start, stop = layout.range(self._comm.rank)
        ops = ShardedSequenceOps(self._comm, layout, exchange=self._exchange, deterministic=self._deterministic)
        h_BLD, self._state = self._model.hidden(tokens_T[None, start:stop], ops, self._state)
        return reduce_to_pieces(
            h_BLD[0], position + start, 0, self._spec, _ends_in(ends, position + start, len(h_BLD[0]))
        )

    def carry_bytes(self) -> int:
        """The bytes this rank sent of its own states; of rings, all that it passed on."""
        return _carry_bytes(self._comm, self._exchange)


@final
class SequenceReader(BlockReader):
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
        self.device = model.embedding.weight.device
        self._comm, self._model, self._spec = comm, model, spec

    def read(self, tokens_T: torch.Tensor, position: int, ends: Sequence[int] = ()) -> RowPieces:
        """Rows of the sequences in this rank's part."""
        start, stop = SequenceLayout.even(len(tokens_T), self._comm.size, self.grain).range(self._comm.rank)
        if start == stop:
            return RowPieces(0, [], [], b"")
        own = _ends_in(ends, position + start, stop - start)
        return read_sequences(self._model, tokens_T[start:stop], position + start, 0, self._spec, own)


@final
class WholeReader(BlockReader):
    """Sequences of up to `max_tokens` through a model of sequences: each lies over all ranks, and stands alone.

    Raises: InputError where the same bytes are asked for on any number of ranks: rows come from sums in another order.
    """

    def __init__(self, comm: Communicator, model: SequenceModel, spec: RowSpec, *, deterministic: bool = False) -> None:
        if deterministic:
            raise InputError(
                f"the rows of a {model.config.kind} cannot be deterministic over ranks; leave the option out"
            )
        self.dim, self.grain, self.device = model.hidden_size, model.max_tokens, model.device
        self._comm, self._model, self._spec = comm, model, spec

    def read(self, tokens_T: torch.Tensor, position: int, ends: Sequence[int] = ()) -> RowPieces:
        """Rows of the vectors of all positions."""
        layout = SequenceLayout.even(len(tokens_T), self._comm.size, GRAIN)
        start, stop = layout.range(self._comm.rank)
        ops = ShardedSequenceOps(self._comm, layout)
        h_BLD = self._model.hidden(tokens_T[None, start:stop], ops)
        return reduce_to_pieces(
            h_BLD[0], position + start, 0, self._spec, _ends_in(ends, position + start, stop - start)
        )


def short_tokens(model: Model | StreamingModel, spec: RowSpec) -> int:
    """The most tokens of a text that `read_together` takes beside others; 0 for a model that reads each alone."""
    if isinstance(model, StreamEncoder):
        return model.grain - 1
    if isinstance(model, TextEncoder) and not spec.marked:
        return sequence_length(spec, model.config.text_tokens)
    return 0


def read_together(
    model: StreamingModel | TextEncoder | SequenceModel,
    texts: Sequence[np.ndarray],
    spec: RowSpec,
    device: torch.device,
) -> list[RowPieces]:
    """The pieces of whole texts of at most `short_tokens` each, marked where rows end, read in few passes.

    The last bits of a row may depend on which texts are read beside it.

    Raises: InputError for another model, and for a mixer that takes no packed documents.
    """
    tokens = [send(torch.from_numpy(unmarked(text).astype(np.int64)), device) for text in texts]
    if isinstance(model, StreamEncoder):
        hidden = zip(texts, model.short_hidden(tokens), strict=True)
        return [reduce_to_pieces(h_1LD[0], 0, 0, spec, marked_ends(text).tolist()) for text, h_1LD in hidden]
    if not isinstance(model, TextEncoder):
        raise InputError("this model reads each text alone")
    step = 1 if spec.granularity == "token" else model.config.text_tokens
    vectors = zip(texts, vectors_together(model, tokens, [spec] * len(texts)), strict=True)
    return [row_pieces(rows_ND, range(0, len(text), step), len(text), 0) for text, rows_ND in vectors]


def _carry_bytes(comm: Communicator, exchange: Algorithm) -> int:
    """Count the bytes of own states that this rank sent since traffic was cleared; of rings, all that it passed on."""
    carries = [e for e in comm.traffic.events if e.label == "carry" and e.messages]
    if exchange.endswith("ring"):
        return sum(e.bytes_sent for e in carries)
    # A layer's state is sent first in what is launched or all gathered; later steps of an exchange send what was made
    # of it. Deterministic ranks launch nothing and only pass their states on.
    first = [e for e in carries if e.phase == "launch" or e.name == "all_gather"]
    return sum(e.bytes_sent // e.messages for e in first or carries)


def _ends_in(ends: Sequence[int], start: int, length: int) -> list[int]:
    """The ends of rows after token `start`, up to `start + length`."""
    return [end for end in ends if start < end <= start + length]


TOKENS, ROWS = "tokens", "rows"  # in the traffic log


@dataclass(frozen=True)
class Seconds:
    """The parts of one rank's time, one after the other; the same four as in `costs.Estimate`.

    `compute` is the model without what its exchanges hold up, which is `exchange`, with waiting there for slower ranks;
    `text` is reading and tokenising, on rank 0 only; `handing` the tokens to the ranks and the rows back, which on
    other ranks holds their wait for the text.
    """

    compute: float = 0.0
    exchange: float = 0.0
    text: float = 0.0
    handing: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class EncodedBlock:
    """`tokens` of all ranks; on rank 0 the pieces of rows of every rank, in order.

    `carry_bytes` is what this rank contributed to the exchange of states, as `EncodeReport` says it.
    """

    tokens: int
    pieces: list[RowPieces]
    carry_bytes: int
    seconds: Seconds


def encode_blocks(
    comm: Communicator, reader: BlockReader, blocks: Iterator[np.ndarray] | None
) -> Iterator[EncodedBlock]:
    """Encode the token blocks of rank 0 (None elsewhere), each split over all ranks.

    Every rank goes through the iterator to its end.
    """
    position = 0
    while True:
        began = time.perf_counter()
        block = next(blocks, _NOTHING) if blocks is not None else _NOTHING
        read = time.perf_counter()
        tokens = _hand_out(comm, block)
        if not len(tokens):
            return
        handed_out = time.perf_counter()
        comm.traffic.clear()
        ends = marked_ends(tokens.numpy(), position).tolist()
        pieces = reader.read(send(torch.where(tokens < 0, ~tokens, tokens), reader.device), position, ends)
        exposed, carry_bytes = comm.traffic.exposed_s, reader.carry_bytes()
        computed = time.perf_counter()
        collected = _collect(comm, pieces, reader.dim)
        seconds = Seconds(
            compute=computed - handed_out - exposed,
            exchange=exposed,
            text=read - began,
            handing=handed_out - read + time.perf_counter() - computed,
        )
        position += len(tokens)
        yield EncodedBlock(len(tokens), collected, carry_bytes, seconds)


_NOTHING = np.empty(0, dtype=np.int32)


def _hand_out(comm: Communicator, block: np.ndarray) -> torch.Tensor:
    """The block of rank 0 on every rank; empty at the end."""
    count = int(comm.broadcast(torch.tensor([len(block)]), 0, label=TOKENS))
    if not count:
        return torch.empty(0, dtype=torch.int64)
    mine = torch.from_numpy(block) if comm.rank == 0 else torch.empty(count, dtype=torch.int32)
    return comm.broadcast(mine, 0, label=TOKENS).to(torch.int64)


def _collect(comm: Communicator, pieces: RowPieces, dim: int) -> list[RowPieces]:
    """All ranks' pieces, in order of rank, on rank 0; nothing elsewhere."""
    if comm.size == 1:
        return [pieces]
    count = len(pieces.starts)
    counts = comm.all_gather(torch.tensor([count]), label=ROWS)[:, 0].tolist()
    ends = np.isin(pieces.stops, pieces.ends).astype(np.int64)
    ranges = torch.from_numpy(np.array([pieces.starts, pieces.stops, ends], dtype=np.int64).T.reshape(count, 3).copy())
    vectors = torch.frombuffer(bytearray(pieces.vectors), dtype=torch.float32) if count else torch.empty(0)
    send = [count] + [0] * (comm.size - 1)
    receive = counts if comm.rank == 0 else [0] * comm.size
    all_ranges = comm.all_to_all(ranges, send, receive, label=ROWS)
    all_vectors = comm.all_to_all(vectors.reshape(count, dim), send, receive, label=ROWS)
    if comm.rank != 0:
        return []
    return [
        RowPieces(0, r[:, 0].tolist(), r[:, 1].tolist(), v.numpy().tobytes(), r[r[:, 2] > 0, 1].tolist())
        for r, v in zip(all_ranges.split(counts), all_vectors.split(counts), strict=True)
    ]
