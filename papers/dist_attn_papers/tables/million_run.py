"""One layer over the books, on one rank and on several: seconds, peak of memory, bytes, and how far results differ."""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.memory import TrackedMemory
from dist_attn.comm import Communicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerState
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.tables.million_layers import ARMS, WIDTH, build_layer

__all__ = ["Plan", "Reading", "first_bytes", "read_in_blocks", "read_over_ranks", "read_slice", "read_whole"]

TIMEOUT_S = 600.0
COMPARED_ROWS = 1 << 16


@dataclass(frozen=True)
class Plan:
    """Which layer reads the first so many tokens, in blocks of how many where it streams, on how many ranks.

    Outputs at the longest length are those of one rank's file, [L, D] in float32.
    """

    name: str
    lengths: tuple[int, ...]
    ranks: int
    block: int
    seed: int
    outputs: Path


@dataclass(frozen=True)
class Reading:
    """One length, read. Units: seconds; bytes; `peak` is of tensors above weights, input and output among them.

    `difference` is the largest one to the outputs of one rank, `largest` the largest of those; both 0 where they were
    not compared. Of several ranks each number is the largest. The streamed ones are of blocks with a carried state.
    """

    seconds: float
    peak: int
    sent: int = 0
    received: int = 0
    difference: float = 0.0
    largest: float = 0.0
    streamed_seconds: float = 0.0
    streamed_peak: int = 0
    streamed_sent_per_block: int = 0
    streamed_difference: float = 0.0

    def largest_of(self, other: "Reading") -> "Reading":
        """The larger of each number."""
        mine, theirs = vars(self), vars(other)
        return replace(self, **{name: max(mine[name], theirs[name]) for name in mine})


def first_bytes(folder: Path, count: int) -> NDArray[np.uint8]:
    """The first bytes of all books of a folder, one behind the other in the order of their names.

    Raises: ConfigError where there are fewer.
    """
    parts, found = [], 0
    for path in sorted(folder.glob("*.txt")):
        parts.append(np.fromfile(path, dtype=np.uint8, count=count - found))
        found += len(parts[-1])
        if found == count:
            return np.concatenate(parts)
    raise ConfigError(f"{folder} has books of {found} bytes; {count} are to be read: put the books there, or read less")


@torch.inference_mode()
def read_whole(plan: Plan, tokens_L: NDArray[np.uint8]) -> Reading:
    """On this process alone; the outputs at the longest length go into the file."""
    _, layer = build_layer(plan.name, len(tokens_L), plan.seed)
    ops, held = LocalSequenceOps(), torch.from_numpy(tokens_L)
    started = time.perf_counter()
    layer(held, ops, None)
    seconds = time.perf_counter() - started
    with TrackedMemory() as tracked:
        y_LD, _ = layer(held, ops, None)
    if len(tokens_L) == max(plan.lengths):
        y_LD.contiguous().numpy().tofile(plan.outputs)
    return Reading(seconds, tracked.peak)


def read_over_ranks(plan: Plan, tokens_L: NDArray[np.uint8]) -> list[Reading]:
    """All lengths, by processes over gloo with one thread each; compared with the file at the longest."""
    # Ranks are forked from a process that has imported all of this once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder, context.Pool(plan.ranks) as pool:
        store = (Path(folder) / "store").as_uri()
        of_ranks = pool.starmap(_rank_main, [(rank, store, plan, tokens_L) for rank in range(plan.ranks)], chunksize=1)
    found = of_ranks[0]
    for others in of_ranks[1:]:
        found = [one.largest_of(other) for one, other in zip(found, others, strict=True)]
    return found


def _rank_main(rank: int, store: str, plan: Plan, tokens_L: NDArray[np.uint8]) -> list[Reading]:
    torch.set_num_threads(1)
    cpu, found = torch.device("cpu"), []
    with TorchDistCommunicator.connect(
        "gloo", timeout_s=TIMEOUT_S, device=cpu, meeting=store, rank=rank, size=plan.ranks
    ) as comm:
        for length in plan.lengths:
            reading = read_slice(comm, plan, tokens_L[:length])
            if ARMS[plan.name].streams:
                reading = read_in_blocks(comm, plan, tokens_L[:length], reading)
            found.append(reading)
            if rank == 0:
                print(
                    f"{plan.name}: {length:,} tokens on {plan.ranks} ranks: {reading.seconds:.1f} s whole, "
                    f"{reading.streamed_seconds:.1f} s in blocks",
                    file=sys.stderr,
                    flush=True,
                )
    return found


@torch.inference_mode()
def read_slice(comm: Communicator, plan: Plan, tokens_L: NDArray[np.uint8]) -> Reading:
    """This rank's slice: once for the time, once for memory, bytes and the comparison."""
    layout = SequenceLayout.even(len(tokens_L), comm.size)
    start, stop = layout.range(comm.rank)
    _, layer = build_layer(plan.name, len(tokens_L), plan.seed)
    ops, own = ShardedSequenceOps(comm, layout), torch.from_numpy(tokens_L[start:stop])
    comm.barrier()
    started = time.perf_counter()
    layer(own, ops, None)
    seconds = time.perf_counter() - started
    comm.traffic.clear()
    with TrackedMemory() as tracked:
        y_LD, _ = layer(own, ops, None)
    reading = Reading(seconds, tracked.peak, comm.traffic.bytes_sent, comm.traffic.bytes_received)
    if len(tokens_L) != max(plan.lengths):
        return reading
    difference, largest = _compare(y_LD, plan.outputs, start)
    return replace(reading, difference=difference, largest=largest)


@torch.inference_mode()
def read_in_blocks(comm: Communicator, plan: Plan, tokens_L: NDArray[np.uint8], reading: Reading) -> Reading:
    """The sequence in blocks, each cut over all ranks, with the state carried from block to block."""
    _, layer = build_layer(plan.name, len(tokens_L), plan.seed)
    compared = len(tokens_L) == max(plan.lengths)
    state: MixerState | None = None
    peak = sent = 0
    difference = taken = 0.0
    comm.barrier()
    for first, last in _blocks(len(tokens_L), plan.block):
        layout = SequenceLayout.even(last - first, comm.size)
        start, stop = (first + at for at in layout.range(comm.rank))
        ops, own = ShardedSequenceOps(comm, layout), torch.from_numpy(tokens_L[start:stop])
        comm.traffic.clear()
        started = time.perf_counter()
        with TrackedMemory() as tracked:
            y_LD, state = layer(own, ops, state)
        taken += time.perf_counter() - started
        peak, sent = max(peak, tracked.peak), max(sent, comm.traffic.bytes_sent)
        if compared:
            difference = max(difference, _compare(y_LD, plan.outputs, start)[0])
    return replace(
        reading,
        streamed_seconds=taken,
        streamed_peak=peak,
        streamed_sent_per_block=sent,
        streamed_difference=difference,
    )


def _blocks(length: int, block: int) -> Iterator[tuple[int, int]]:
    return pairwise([*range(0, length, block), length])


def _compare(y_LD: Tensor, outputs: Path, start: int) -> tuple[float, float]:
    """The largest difference to the rows of the file from `start` on, and their largest number; few rows at a time."""
    difference = largest = 0.0
    for first, last in _blocks(len(y_LD), COMPARED_ROWS):
        at = 4 * WIDTH * (start + first)
        numbers = np.fromfile(outputs, np.float32, WIDTH * (last - first), offset=at)
        rows_LD = torch.from_numpy(numbers.reshape(-1, WIDTH))
        difference = max(difference, float((y_LD[first:last] - rows_LD).abs().max()))
        largest = max(largest, float(rows_LD.abs().max()))
    return difference, largest
