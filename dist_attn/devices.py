"""Which device a process computes on, in which precision, and how that is said."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError
from dist_attn.ops.device import without_autocast
from dist_attn.ops.linear_attention import kernels_taken
from dist_attn.wire.choices import Precision, check_device


@dataclass(frozen=True)
class Compute:
    """The device of this process, and the type that products are computed in: float32 or bfloat16."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[object]:
        """Around whatever computes; states, sums and denominators stay float32 inside it."""
        if self.dtype == torch.bfloat16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return without_autocast(self.device)

    def sentence(self, comm: Communicator | None = None) -> str:
        """Device, precision, ranks, their back end and the kernels, with the reason; of rank 0 where there are more."""
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        ranks = "1 rank" if comm is None or comm.size == 1 else f"{comm.size} ranks over {comm.backend}"
        precision = str(self.dtype).removeprefix("torch.")
        return f"device {self.device}{name}, {precision}, {ranks}, kernels: {kernels_taken(self.device)}"


ON_CPU = Compute(torch.device("cpu"), torch.float32)


def choose_compute(device: str = "auto", dtype: Precision = "auto", environ: Mapping[str, str] = os.environ) -> Compute:
    """What `device` and `dtype`, named as in `wire.choices`, come to in this process.

    Raises: ConfigError as `choose_device` and `compute_on`.
    """
    return compute_on(choose_device(device, environ), dtype)


def compute_on(device: torch.device, dtype: Precision = "auto") -> Compute:
    """The precision that `dtype` names, on a device.

    Raises: ConfigError for bfloat16 on a GPU that does not compute in it.
    """
    narrow = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" and not narrow:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"dtype is bfloat16, and {name} does not compute in it: take float32")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and narrow else "float32"
    return Compute(device, getattr(torch, dtype))


def choose_device(name: str = "auto", environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device called `name` (auto, cpu, cuda or cuda:N) for this process.

    `cuda` is the GPU of this process's number on its host. Ranks whose launcher shows each of them one GPU
    (CUDA_VISIBLE_DEVICES) take that one.

    Raises: ConfigError for another name, for a GPU that is not there, and for a rank without a GPU of its own.
    """
    try:
        check_device(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if not count:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        raise ConfigError(f"device is {name}, but {why}: take --device cpu, or look at `dist-attn doctor`")
    local, own = local_rank(environ), name in ("auto", "cuda")
    index = local if own else int(name.partition(":")[2])
    if own and index >= count == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
        index = 0  # whether it is this rank's alone is seen when the ranks meet
    if index >= count:
        what = f"rank {local} of this host has no GPU of its own" if own else f"device is {name}"
        raise ConfigError(
            f"{what}: torch finds {count} here; start at most {count} rank{'s' * (count > 1)} on this host, let all "
            f"share one with --device cuda:0, or take --device cpu"
        )
    return torch.device("cuda", index)


LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def local_rank(environ: Mapping[str, str]) -> int:
    """The number of this process among those of its host, as its launcher says; 0 where none does."""
    numbers = (environ.get(name, "") for name in LOCAL_RANK_VARIABLES)
    return next((int(number) for number in numbers if number.isdecimal()), 0)
