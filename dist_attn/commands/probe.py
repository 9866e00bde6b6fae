"""`python -m dist_attn.commands.probe`: one of two short-lived processes that try out torch, or MPI, for `doctor`.

Both join a group and gather a message. Rank 0 writes each finding to a file as soon as it has it, so that whoever
waits for it knows how far it came, whatever happens to it then.
"""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from dist_attn.commands.machine import MachineFinding, broken, missing, ok
from dist_attn.commands.tables import byte_size, duration
from dist_attn.commands.trial_ranks import TrialSettings, gather_times, join_trial, machine_speeds, read_own
from dist_attn.launchers import is_first_rank

__all__ = ["ADVICE", "OPTIONAL", "ProbeSettings", "findings_in"]

ROUNDS = 21
WARM_UP_ROUNDS = 3
ERROR_CHARACTERS = 500


class ProbeSettings(TrialSettings, frozen=True, kw_only=True):
    """Arguments of one of the two processes that try out torch or MPI."""

    ranks: int = 2
    model: str = ""
    message_bytes: int = 1
    timeout_s: float = 10.0

    @property
    def report(self) -> Path:
        """The file of the findings, one JSON object per line."""
        return Path(self.folder) / "findings"

    @property
    def checks(self) -> list[str]:
        """The names of rank 0's checks, in order."""
        if self.backend == "mpi":
            return ["mpi"]
        return [name for name in CHECKS if name != "mpi" and (name != "model" or self.model)]


def findings_in(settings: ProbeSettings) -> list[MachineFinding]:
    """Read the findings written so far; a last line that is not whole is left out."""
    if not settings.report.exists():
        return []
    lines = settings.report.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=MachineFinding) for line in lines]


def run(settings: ProbeSettings) -> None:
    """Perform this rank's part: rank 0 checks, the other rank joins its exchange."""
    if not (is_first_rank(os.environ) if settings.backend == "mpi" else settings.rank == 0):
        _gather_times(settings)
        return
    with settings.report.open("ab", buffering=0) as report:
        for name in settings.checks:
            finding = _tried(name, CHECKS[name], settings)
            report.write(msgspec.json.encode(finding) + b"\n")
            if name == "torch" and finding.blocks:
                return


def _tried(name: str, check: Callable[[ProbeSettings], MachineFinding], settings: ProbeSettings) -> MachineFinding:
    try:
        return check(settings)
    except Exception as error:
        # Whatever a broken installation raises is a finding, not a failure of the doctor.
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
        return broken(name, text, ADVICE.get(name, ""), needed=name not in OPTIONAL)


def check_torch(_: ProbeSettings) -> MachineFinding:
    """Check that torch can be imported, and tell how it was built."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    threads = torch.get_num_threads()
    detail = f"torch {torch.__version__} ({built}), {threads} compute thread{'s' if threads > 1 else ''}"
    return ok("torch", detail, threads=threads)


FIRST_BFLOAT16 = 8  # the major compute capability of GPUs that multiply in it


def check_cuda(_: ProbeSettings) -> MachineFinding:
    """List the GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no NVIDIA GPU or driver"
        return missing("cuda", f"optional, {why}", "models run on the CPU")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    detail = ", ".join(f"{d.name} with {byte_size(d.total_memory)}" for d in devices)
    return ok("cuda", detail, devices=len(devices), bfloat16=sum(d.major >= FIRST_BFLOAT16 for d in devices))


def check_nccl(_: ProbeSettings) -> MachineFinding:
    """Check the back end between GPUs."""
    import torch

    if not torch.cuda.is_available():
        return missing("nccl", "optional back end between NVIDIA GPUs; there is none", "use gloo")
    from torch.cuda import nccl

    return ok("nccl", f"NCCL {'.'.join(map(str, nccl.version()))}")


def check_exchange(settings: ProbeSettings) -> MachineFinding:
    """Time a real all-gather between the two processes."""
    seconds = _gather_times(settings)
    median = statistics.median(seconds)
    detail = (
        f"all-gather of a {byte_size(settings.message_bytes)} state between 2 processes in {duration(median)} "
        f"(slowest of {len(seconds)}: {duration(max(seconds))})"
    )
    return ok(settings.backend, detail, all_gather_seconds=median, message_bytes=settings.message_bytes)


def check_matmul(_: ProbeSettings) -> MachineFinding:
    """Time this process's products of float32 matrices and its copies of memory."""
    import torch

    rate, moved = machine_speeds()
    threads = torch.get_num_threads()
    detail = (
        f"{rate / 1e9:.0f} GFLOP/s in float32 products with {threads} thread{'s' if threads > 1 else ''}, "
        f"{moved / 1e9:.1f} GB/s in copies: `dist-attn plan --gflops {rate / 1e9:.0f}`"
    )
    return ok("speed", detail, matmul_gflops=rate / 1e9, copy_gb_per_s=moved / 1e9)


def check_kernels(_: ProbeSettings) -> MachineFinding:
    """Check that linear attention has its C kernels here; they are compiled when they have not been."""
    from dist_attn.ops.linear_attention import half_products, why_no_library

    why_not = why_no_library()
    if why_not is not None:
        return missing(
            "kernels", f"optional, {why_not}", "linear attention takes four times as long: install gcc and libc6-dev"
        )
    halves = "its bfloat16 instructions" if half_products() else "float32 instructions: it has no bfloat16 ones"
    return ok("kernels", f"linear attention by C kernels, compiled for this processor; bfloat16 tensors by {halves}")


def check_model(settings: ProbeSettings) -> MachineFinding:
    """Check that the model and its tokeniser load, and that its manifest lists exactly these files."""
    from dist_attn.checkpoints import kind_of_model, load_model, load_stream_encoder, load_text_encoder
    from dist_attn.control.preflight import check_downloaded
    from dist_attn.models import LanguageModel, StreamEncoder, TextEncoder
    from dist_attn.shipped import origin
    from dist_attn.text import load_tokeniser

    folder = Path(settings.model)
    if origin(folder) == "downloaded":
        parameters = check_downloaded(folder).parameters
        return ok("model", f"{folder.name} fits its configuration, {parameters:,} parameters", parameters=parameters)
    kind = kind_of_model(folder)
    if kind == "text_encoder":
        model: LanguageModel | TextEncoder | StreamEncoder = load_text_encoder(folder)
    else:
        model = load_stream_encoder(folder) if kind == "stream_encoder" else load_model(folder)
    tokeniser = load_tokeniser(folder)
    parameters = sum(p.numel() for p in model.parameters())
    if tokeniser.vocab_size > model.config.vocab_size:
        raise ValueError(f"{tokeniser.vocab_size} tokens in tokenizer.json, {model.config.vocab_size} in the model")
    detail = f"{folder.name} loads, {parameters:,} parameters"
    if not (folder / "manifest.json").is_file():
        return missing("model", f"{detail}, no manifest.json", "its files cannot be checked", needed=False)
    return ok("model", f"{detail}, manifest right", parameters=parameters)


# In this order: what the service needs comes before what is only good to know.
CHECKS: dict[str, Callable[[ProbeSettings], MachineFinding]] = {
    "torch": check_torch,
    "cuda": check_cuda,
    "nccl": check_nccl,
    "gloo": check_exchange,
    "model": check_model,
    "speed": check_matmul,
    "kernels": check_kernels,
    "mpi": check_exchange,
}
OPTIONAL = {"cuda", "nccl", "speed", "kernels", "mpi"}
ADVICE = {
    "torch": "`make setup`, or `pip install torch`",
    "gloo": "ranks on one machine need a network interface: try GLOO_SOCKET_IFNAME=lo",
    "mpi": "try `mpiexec -n 2 python -c 'from mpi4py import MPI'`, or use gloo",
    "model": "fetch the model folder again, or name another with --model DIR",
}


def _gather_times(settings: ProbeSettings) -> list[float]:
    """Seconds of each all-gather; both ranks call this."""
    with join_trial(settings) as comm:
        return gather_times(comm, settings.message_bytes, rounds=ROUNDS, warm_up=WARM_UP_ROUNDS)


if __name__ == "__main__":
    run(read_own(sys.argv[1:], ProbeSettings))
