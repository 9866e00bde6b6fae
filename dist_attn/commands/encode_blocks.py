"""The loop of an encoding: rank 0's tokens to every rank, hidden states there, the pieces of rows back to rank 0."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dist_attn.comm import Communicator
from dist_attn.commands.block_readers import BlockReader
from dist_attn.wire.rank_messages import RowPieces

__all__ = ["EncodedBlock", "Seconds", "encode_blocks"]

TOKENS, ROWS = "tokens", "rows"  # in the traffic log


@dataclass(frozen=True)
class Seconds:
    """Where one rank's time goes, one after the other; the same four as in `costs.Estimate`.

    `compute` is the model without what its exchanges hold up, which is `exchange`, with waiting there for slower ranks;
    `text` is reading and tokenising, on rank 0 only; `handing` the tokens to the ranks and the rows back, which on
    other ranks holds their wait for the text.
    """

    compute: float = 0.0
    exchange: float = 0.0
    text: float = 0.0
    handing: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.compute + other.compute,
            self.exchange + other.exchange,
            self.text + other.text,
            self.handing + other.handing,
        )


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
        pieces = reader.read(tokens, position)
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
    ranges = torch.tensor([pieces.starts, pieces.stops], dtype=torch.int64).T.reshape(count, 2)
    vectors = torch.frombuffer(bytearray(pieces.vectors), dtype=torch.float32) if count else torch.empty(0)
    send = [count] + [0] * (comm.size - 1)
    receive = counts if comm.rank == 0 else [0] * comm.size
    all_ranges = comm.all_to_all(ranges, send, receive, label=ROWS)
    all_vectors = comm.all_to_all(vectors.reshape(count, dim), send, receive, label=ROWS)
    if comm.rank != 0:
        return []
    return [
        RowPieces(0, r[:, 0].tolist(), r[:, 1].tolist(), v.numpy().tobytes())
        for r, v in zip(all_ranges.split(counts), all_vectors.split(counts), strict=True)
    ]
