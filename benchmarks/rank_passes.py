"""Passes of sharded attention on ranks that are processes, each kept to a core: seconds, processor time, bytes, waits.

In every round the first rank also does the whole pass alone while the others wait, so that a change of the machine's
speed meets both.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from benchmarks.cases import HEADS, attention_inputs, delta_inputs
from benchmarks.setting import own_cores, pin_to
from dist_attn.comm import Communicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps

__all__ = ["Pass", "Passed", "on_ranks", "pass_on_rank", "run_passes"]

Result = TypeVar("Result")
Attend = Callable[..., torch.Tensor]

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Pass:
    """Attention over `length` tokens at the reference shape, B1 H8 d64, 64 random vectors, or the gated delta rule.

    With `alone` the first rank also does it by itself in every round. `delta` has heads of 128.
    """

    length: int
    gated: bool = False
    gradients: bool = False
    alone: bool = True
    delta: bool = False

    @property
    def name(self) -> str:
        """As ratios call it."""
        return f"{'gated' if self.gated else 'ungated'} forward{' and backward' * self.gradients}"


@dataclass(frozen=True)
class Passed:
    """A pass on one rank. Units: seconds of every round, bytes that it sends in one round.

    `cpu_s` is the processor time of the whole process; `exposed_s` the time in exchanges, waiting for slower ranks
    included; `alone_s` is empty on all ranks but the first.
    """

    alone_s: tuple[float, ...]
    together_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    bytes_sent: int

    @property
    def exposed_share(self) -> float:
        """The middle of the rounds' shares."""
        return statistics.median(e / t for e, t in zip(self.exposed_s, self.together_s, strict=True))

    @property
    def numbers(self) -> dict[str, float]:
        """Medians of the rounds, and bytes."""
        seconds = {"seconds": self.together_s, "processor seconds": self.cpu_s, "exposed seconds": self.exposed_s}
        seconds |= {"seconds alone": self.alone_s} if self.alone_s else {}
        return {what: statistics.median(of) for what, of in seconds.items()} | {"bytes sent": self.bytes_sent}


def run_passes(passes: Sequence[Pass], ranks: int, rounds: int) -> list[list[Passed]]:
    """Every pass on every rank, in order of passes and of ranks; ranks live for all passes, rank r on core r."""
    of_ranks = on_ranks(partial(_all_passes, passes=passes, rounds=rounds), ranks)
    return [list(of_pass) for of_pass in zip(*of_ranks, strict=True)]


def _all_passes(comm: Communicator, passes: Sequence[Pass], rounds: int) -> list[Passed]:
    return [pass_on_rank(comm, one, rounds) for one in passes]


def on_ranks(work: Callable[[Communicator], Result], ranks: int) -> list[Result]:
    """What the work gives on each rank; ranks are processes, each on a core of its own as far as there are any."""
    cores = own_cores()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        store = (Path(folder) / "store").as_uri()
        jobs = [(rank, ranks, store, cores[rank % len(cores)], work) for rank in range(ranks)]
        return pool.starmap(_rank_main, jobs, chunksize=1)


def _rank_main(rank: int, ranks: int, store: str, core: int, work: Callable[[Communicator], Result]) -> Result:
    pin_to([core])
    with TorchDistCommunicator.connect(
        "gloo", timeout_s=TIMEOUT_S, device=torch.device("cpu"), meeting=store, rank=rank, size=ranks
    ) as comm:
        return work(comm)


def pass_on_rank(comm: Communicator, one: Pass, rounds: int) -> Passed:
    """Rounds of a pass on this rank, after one that is not counted."""
    layout = SequenceLayout.even(one.length, comm.size)
    whole = _work(one, LocalSequenceOps(), 0, one.length) if one.alone and comm.rank == 0 else None
    ops = ShardedSequenceOps(comm, layout) if comm.size > 1 else LocalSequenceOps()
    share = _work(one, ops, *layout.range(comm.rank))
    taken = []
    for number in range(rounds + 1):
        comm.barrier()
        began = time.perf_counter()
        if whole is not None:
            whole()
        alone_s = time.perf_counter() - began
        comm.barrier()
        comm.traffic.clear()
        cpu_began, began = time.process_time(), time.perf_counter()
        share()
        together_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        if number:
            taken.append((alone_s, together_s, cpu_s, comm.traffic.exposed_s))
    alone, together, cpu, exposed = zip(*taken, strict=True)
    return Passed(() if whole is None else alone, together, cpu, exposed, comm.traffic.bytes_sent)


def _work(one: Pass, ops: SequenceOps, start: int, stop: int) -> Callable[[], object]:
    """The pass over tokens `start` to `stop`, the same numbers wherever it is cut."""
    inputs, attend = (delta_inputs(one.length), _delta(ops)) if one.delta else _attention(one, ops, start, stop)
    leaves = [t[:, :, start:stop].clone().requires_grad_(one.gradients) for t in inputs]
    if not one.gradients:
        return torch.inference_mode()(lambda: attend(*leaves))
    weight = torch.ones(1, 1, 1, 1).expand(leaves[2].shape)
    return lambda: torch.autograd.grad(attend(*leaves), leaves, weight)


def _delta(ops: SequenceOps) -> Attend:
    return lambda q, k, v, decay, beta: ops.gated_delta_rule(q, k, v, beta_BHL=beta, log_decay_BHLK=decay)[0]


def _attention(one: Pass, ops: SequenceOps, start: int, stop: int) -> tuple[list[torch.Tensor], Attend]:
    qkv, feature_map = attention_inputs(one.length)
    gate = scale = None
    if one.gated:
        # Gates of a trained model: most of them near 1, the state of some hundred tokens before is forgotten.
        generator = torch.Generator().manual_seed(one.length + 1)
        logits = torch.randn((1, HEADS, one.length), generator=generator)[:, :, start:stop] + 3
        gate, scale = F.logsigmoid(logits), torch.sigmoid(-logits)
    attend = partial(ops.linear_attention, feature_map=feature_map, log_gate_BHS=gate, key_scale_BHS=scale)
    return qkv, lambda q, k, v: attend(q, k, v)[0]
