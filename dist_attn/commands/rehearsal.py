"""`python -m dist_attn.commands.rehearsal`: ranks that encode for a moment, so `plan` knows how fast this machine is.

As many processes as the plan has ranks go through the loop of `encode` at the same time: they share cores and memory,
wait for each other in the same exchanges, and hand tokens and rows over as an encoding does.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dist_attn.commands.options import PlanOptions
from dist_attn.commands.trial_ranks import TrialSettings, gather_times, join_trial, machine_speeds, read_own, run_trial
from dist_attn.costs import LanguageModelCosts, Link, Rates
from dist_attn.errors import EngineError, MissingExtraError, extra_hint
from dist_attn.host_limits import compute_environment
from dist_attn.launchers import find_mpiexec, lacks_for_mpi
from dist_attn.wire.choices import Precision

if TYPE_CHECKING:
    import numpy as np

    from dist_attn.text import Tokeniser

__all__ = ["RehearsalSettings", "measured_rates"]

READ_S = 5.0
WARM_UP_BLOCKS = 1
TEXT_BYTES = 1 << 18  # as much as `encode` reads at once
GATHERS = 20
WARM_UP_GATHERS = 5
SMALL_MESSAGE_BYTES = 1024
DEADLINE_S = 120.0


class RehearsalSettings(TrialSettings, frozen=True, kw_only=True):
    """Arguments of one of the processes that encode for a moment."""

    model: str
    block_tokens: int
    message_bytes: int
    exchange: str = "auto"
    device: str = "cpu"
    dtype: Precision = "float32"
    read_s: float = READ_S


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The times that the processes found: of a block as rank 0 spends them, the rest as medians over the ranks.

    `blocks` were timed, after WARM_UP_BLOCKS.
    """

    blocks: int
    compute_s: float
    exchange_s: float
    handing_s: float
    text_tokens_per_s: float
    matmul_flops_per_s: float
    copied_bytes_per_s: float
    gather_small_s: float
    gather_message_s: float


def measured_rates(
    folder: Path,
    costs: LanguageModelCosts,
    block_tokens: int,
    read_s: float = READ_S,
    *,
    options: PlanOptions,
) -> Rates:
    """Measure the rates of one rank while all ranks encode on this machine for `read_s` and do a little more.

    `options` say over what they exchange, and what they compute on.

    Raises: EngineError when the processes cannot be started, fail or are late; MissingExtraError for a back end that is
        not installed.
    """
    ranks = options.ranks
    message_bytes = max(costs.carry_bytes, 2 * SMALL_MESSAGE_BYTES)
    settings = RehearsalSettings(
        ranks=ranks,
        model=str(folder.resolve()),
        block_tokens=block_tokens,
        message_bytes=message_bytes,
        backend=options.backend if ranks > 1 else "gloo",
        exchange=options.exchange,
        device=options.device,
        dtype=options.dtype,
        read_s=read_s,
        timeout_s=DEADLINE_S / 2,
    )
    measured = _rehearse(settings)
    done = [_operations(costs, WARM_UP_BLOCKS + more, ranks, block_tokens) for more in (0, measured.blocks)]
    reached = (done[1] - done[0]) / (measured.blocks * measured.compute_s)
    return Rates(
        matmul_flops_per_s=measured.matmul_flops_per_s,
        memory_bytes_per_s=measured.copied_bytes_per_s,
        prefill_efficiency=reached / measured.matmul_flops_per_s,
        link=_link(measured, message_bytes, ranks),
        text_tokens_per_s=measured.text_tokens_per_s,
        exposed_s=measured.exchange_s / costs.config.num_layers if ranks > 1 else 0.0,
        handing_s=measured.handing_s,
    )


def _operations(costs: LanguageModelCosts, blocks: int, ranks: int, block_tokens: int) -> float:
    """Floating-point operations of one rank in the first `blocks` blocks of a document."""
    return blocks * block_tokens * costs.prefill_flops(blocks * ranks * block_tokens, ranks).total


def _link(measured: Measured, message_bytes: int, ranks: int) -> Link:
    """Latency and bandwidth of the alpha-beta model, from both times; noise never makes the bandwidth endless."""
    if ranks == 1:
        return Rates().link
    more_s = max(measured.gather_message_s - measured.gather_small_s, 0.1 * measured.gather_message_s)
    bandwidth = (ranks - 1) * (message_bytes - SMALL_MESSAGE_BYTES) / more_s
    return Link(latency_s=measured.gather_small_s / (ranks - 1), bytes_per_s=bandwidth)


def _rehearse(settings: RehearsalSettings) -> Measured:
    """Run the ranks until the first has the result, or one of them fails."""
    if settings.backend == "mpi" and (find_mpiexec() is None or lacks_for_mpi()):
        raise MissingExtraError(
            f"measuring over MPI needs {' and '.join(lacks_for_mpi())}: {extra_hint('mpi')}, or plan with gloo"
        )
    try:
        result = run_trial(
            "dist_attn.commands.rehearsal",
            settings,
            doing="measuring",
            deadline_s=DEADLINE_S,
            environment=compute_environment(settings.ranks),
        )
    except EngineError as error:
        raise EngineError(f"{error}; try `dist-attn doctor`") from None
    return msgspec.json.decode(result, type=Measured)


def _run(settings: RehearsalSettings) -> None:
    """Encode and time as this rank; rank 0 writes the result."""
    import torch

    from dist_attn.checkpoints import load_model_and_tokeniser
    from dist_attn.commands.encode_blocks import Seconds, StreamReader, encode_blocks
    from dist_attn.devices import choose_compute
    from dist_attn.wire.messages import RowSpec

    place = {} if settings.backend == "mpi" else {"LOCAL_RANK": str(settings.rank)}
    compute = choose_compute(settings.device, settings.dtype, {**os.environ, **place})
    model, tokeniser = load_model_and_tokeniser(settings.model)
    model.to(compute.device)
    with torch.inference_mode(), compute.autocast(), join_trial(settings, compute.device) as comm:
        text_rate, tokens = _tokenised(tokeniser)
        blocks = _blocks(tokens, settings) if comm.rank == 0 else None
        reader = StreamReader(comm, model, RowSpec(), exchange=settings.exchange)  # type: ignore[arg-type]
        spent, counted = Seconds(), -WARM_UP_BLOCKS
        for block in encode_blocks(comm, reader, blocks):
            counted += 1
            spent += block.seconds if counted > 0 else Seconds()

        def gather(size: int) -> float:
            return statistics.median(gather_times(comm, size, rounds=GATHERS, warm_up=WARM_UP_GATHERS))

        gathered = map(gather, (SMALL_MESSAGE_BYTES, settings.message_bytes))
        own = [text_rate, *machine_speeds(comm.barrier, compute), *gathered]
        of_all = comm.all_gather(torch.tensor(own, dtype=torch.float64)).median(dim=0).values.tolist()
        first = comm.rank == 0
    if first:
        times = [counted, spent.compute / counted, spent.exchange / counted, spent.handing / counted]
        settings.write_result(Measured(**dict(zip(Measured.__struct_fields__, [*times, *of_all], strict=True))))


def _tokenised(tokeniser: "Tokeniser") -> tuple[float, "np.ndarray"]:
    """Time the tokeniser on a text that is always at hand, this package's source: tokens per second, and the tokens."""
    import dist_attn

    began, text = time.perf_counter(), b""
    for file in sorted(Path(dist_attn.__file__).parent.rglob("*.py")):
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    tokens = tokeniser.encode(text[:TEXT_BYTES])
    return len(tokens) / (time.perf_counter() - began), tokens


def _blocks(tokens: "np.ndarray", settings: RehearsalSettings) -> Iterator["np.ndarray"]:
    """Repeat whole blocks of these tokens: first those to warm up, then some until the time is over."""
    import numpy as np

    size, at, until = settings.ranks * settings.block_tokens, 0, float("inf")
    while at <= WARM_UP_BLOCKS or time.perf_counter() < until:
        if at == WARM_UP_BLOCKS:
            until = time.perf_counter() + settings.read_s
        yield np.take(tokens, range(at * size, (at + 1) * size), mode="wrap")
        at += 1


if __name__ == "__main__":
    _run(read_own(sys.argv[1:], RehearsalSettings))
