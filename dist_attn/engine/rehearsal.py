"""`python -m dist_attn.engine.rehearsal`: ranks that read for a moment, so that `plan` knows how fast this machine is.

As many processes as the plan has ranks compute and exchange at the same time, because they share cores and memory.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dist_attn.control.ranks import child_environment
from dist_attn.control.settings import threads_for
from dist_attn.control.tether import die_with_parent
from dist_attn.costs import LanguageModelCosts, Link, Rates
from dist_attn.errors import EngineError

__all__ = ["RehearsalSettings", "measured_rates"]

READ_S = 2.0
MATMUL_S = 0.3
MATMUL_SIZE = 768
GATHERS = 20
WARM_UP_GATHERS = 5
SMALL_MESSAGE_BYTES = 1024
DEADLINE_S = 60.0
END_S = 10.0


class RehearsalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the processes is told."""

    rank: int
    ranks: int
    folder: str
    model: str
    block_tokens: int
    message_bytes: int
    read_s: float = READ_S
    timeout_s: float = DEADLINE_S / 2


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes found together: medians over the ranks, which do their work in step."""

    tokens_per_s: float
    matmul_flops_per_s: float
    copied_bytes_per_s: float
    gather_small_s: float
    gather_message_s: float


def measured_rates(
    folder: Path, costs: LanguageModelCosts, ranks: int, block_tokens: int, read_s: float = READ_S
) -> Rates:
    """The rates of one rank while `ranks` of them read on this machine for `read_s` and do a little more.

    Raises: EngineError when the processes cannot be started, fail or are late.
    """
    message_bytes = max(costs.mixer.carry_bytes(), 2 * SMALL_MESSAGE_BYTES)
    measured = _rehearse(folder, ranks, block_tokens, message_bytes, read_s)
    reached = measured.tokens_per_s * costs.prefill_flops(block_tokens, 1).total
    return Rates(
        matmul_flops_per_s=measured.matmul_flops_per_s,
        memory_bytes_per_s=measured.copied_bytes_per_s,
        prefill_efficiency=reached / measured.matmul_flops_per_s,
        link=_link(measured, message_bytes, ranks),
    )


def _link(measured: Measured, message_bytes: int, ranks: int) -> Link:
    """Latency and bandwidth of the alpha-beta model, from both times; noise never makes the bandwidth endless."""
    if ranks == 1:
        return Rates().link
    more_s = max(measured.gather_message_s - measured.gather_small_s, 0.1 * measured.gather_message_s)
    bandwidth = (ranks - 1) * (message_bytes - SMALL_MESSAGE_BYTES) / more_s
    return Link(latency_s=measured.gather_small_s / (ranks - 1), bytes_per_s=bandwidth)


def _rehearse(folder: Path, ranks: int, block_tokens: int, message_bytes: int, read_s: float) -> Measured:
    environment = child_environment()
    environment.setdefault("OMP_NUM_THREADS", str(threads_for(ranks)))
    with tempfile.TemporaryDirectory(prefix="dist-attn-plan-") as private, contextlib.ExitStack() as stack:
        words, result = Path(private) / "stderr", Path(private) / "measured"
        stderr = stack.enter_context(words.open("wb"))
        first: subprocess.Popen[bytes] | None = None
        for rank in range(ranks):
            settings = RehearsalSettings(
                rank=rank,
                ranks=ranks,
                folder=private,
                model=str(folder.resolve()),
                block_tokens=block_tokens,
                message_bytes=message_bytes,
                read_s=read_s,
            )
            command = [sys.executable, "-m", "dist_attn.engine.rehearsal", msgspec.json.encode(settings).decode()]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr, env=environment)
            stack.callback(process.wait, END_S)
            stack.callback(process.kill)
            first = first or process
        assert first is not None
        try:
            code = first.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{ranks} ranks did not finish measuring within {DEADLINE_S:g} s") from None
        if code or not result.exists():
            said = words.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
            raise EngineError(f"measuring with {ranks} rank(s) failed: {said[-1]}; try `dist-attn doctor`")
        return msgspec.json.decode(result.read_bytes(), type=Measured)


def _run(settings: RehearsalSettings) -> None:
    """This rank's part; rank 0 writes the result."""
    import torch

    from dist_attn.checkpoints import load_model
    from dist_attn.comm.torch_dist import TorchDistCommunicator
    from dist_attn.ops import LocalSequenceOps

    model, ops = load_model(settings.model), LocalSequenceOps()
    tokens = torch.randint(model.config.vocab_size, (1, settings.block_tokens))
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE)
    source = torch.zeros(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    state = model.initial_state(1)
    with (
        torch.inference_mode(),
        TorchDistCommunicator.connect(
            "gloo",
            timeout_s=settings.timeout_s,
            device=torch.device("cpu"),
            init_method=(Path(settings.folder) / "store").as_uri(),
            rank=settings.rank,
            size=settings.ranks,
        ) as comm,
    ):

        def per_second(work: Callable[[], object], seconds: float) -> float:
            work()
            comm.barrier()
            began, times = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                work()
                times += 1
            return times / (time.perf_counter() - began)

        def gather_s(size: int) -> float:
            message, seconds = torch.zeros(size, dtype=torch.uint8), []
            for _ in range(WARM_UP_GATHERS + GATHERS):
                began = time.perf_counter()
                comm.all_gather(message)
                seconds.append(time.perf_counter() - began)
            return statistics.median(seconds[WARM_UP_GATHERS:])

        own = [
            settings.block_tokens * per_second(lambda: model.hidden(tokens, ops, state), settings.read_s),
            2 * MATMUL_SIZE**3 * per_second(lambda: a @ b, MATMUL_S),
            2 * len(source) * per_second(lambda: target.copy_(source), MATMUL_S),
            gather_s(SMALL_MESSAGE_BYTES),
            gather_s(settings.message_bytes),
        ]
        of_all = comm.all_gather(torch.tensor(own, dtype=torch.float64)).median(dim=0).values.tolist()
    if settings.rank == 0:
        names = Measured.__struct_fields__
        result = Path(settings.folder) / "measured"
        result.write_bytes(msgspec.json.encode(Measured(**dict(zip(names, of_all, strict=True)))))


def main(arguments: list[str]) -> None:
    """Run the part that the one argument, `RehearsalSettings` as JSON, describes."""
    die_with_parent()
    (text,) = arguments
    _run(msgspec.json.decode(text, type=RehearsalSettings))


if __name__ == "__main__":
    main(sys.argv[1:])
