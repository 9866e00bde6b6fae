"""The choice of the device and the precision that a process computes with, and the sentence that names them."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError
from dist_attn.launchers import place_on_host
from dist_attn.ops.affine.implementation import recurrences_taken
from dist_attn.ops.device import without_autocast
from dist_attn.ops.linear_attention import kernels_taken
from dist_attn.wire.choices import Precision, WeightPrecision, check_device


@dataclass(frozen=True)
class Compute:
    """The device of this process, and the type that products are computed in: float32 or bfloat16."""

    device: torch.device
    dtype: torch.dtype

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """The type's name."""
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def autocast(self) -> AbstractContextManager[object]:
        """Around whatever computes; states, sums and denominators stay float32 inside it."""
        if self.dtype == torch.bfloat16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return without_autocast(self.device)

    def sentence(self, comm: Communicator | None = None, weights: WeightPrecision = "float32") -> str:
        """Device, precision, ranks, their back end and the kernels, with the reason; of rank 0 where there are more.

        `weights` is how those of the model lie in memory, where they are held in fewer bits.
        """
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        ranks = "1 rank" if comm is None or comm.size == 1 else f"{comm.size} ranks over {comm.backend}"
        kernels = kernels_taken(self.device)
        if self.device.type == "cuda":
            kernels += f"; of affine recurrences {recurrences_taken(self.device)}"
        held = "" if weights == "float32" else f", weights in {weights}"
        return f"device {self.device}{name}, {self.precision}{held}, {ranks}, kernels: {kernels}"


ON_CPU = Compute(torch.device("cpu"), torch.float32)


def present_compute(device: torch.device) -> Compute:
    """The device, and the precision in which this thread computes on it just now."""
    return Compute(device, torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32)


def choose_compute(
    device: str = "auto",
    dtype: Precision = "auto",
    environ: Mapping[str, str] = os.environ,
    *,
    fused: bool = False,
) -> Compute:
    """Choose the device and the precision that `device` and `dtype`, named as in `wire.choices`, mean in this process.

    `fused`: the model is one that `checkpoints.fuses_on_cpus`.

    Raises: ConfigError as `choose_device` and `compute_on`.
    """
    compute = compute_on(choose_device(device, environ), dtype, fused=fused)
    if compute.device.type == "cuda":
        torch.cuda.set_device(compute.device)  # also for what asks for none, such as pinned memory
    return compute


def compute_on(device: torch.device, dtype: Precision = "auto", *, fused: bool = False) -> Compute:
    """The precision that `dtype` names, on a device: auto is that in which it is fastest and as good.

    On a CPU that is bfloat16 for `fused` encoders.

    Raises: ConfigError for bfloat16 on a GPU that does not compute in it.
    """
    narrow = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" and not narrow:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"dtype is bfloat16, and {name} does not compute in it: take float32")
    if dtype == "auto":
        dtype = "bfloat16" if (narrow if device.type == "cuda" else fused) else "float32"
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
    own = name in ("auto", "cuda")
    local, of_host = place_on_host(environ) or (0, 1)
    index = local if own else int(name.partition(":")[2])
    if own and count == 1 and environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)  # whether it is this rank's alone is seen when the ranks meet
    if own and count < (needed := max(of_host, index + 1)):
        # On every rank of the host, where their number is known: the first one has a GPU, and is the one that speaks.
        raise ConfigError(
            f"torch finds {count} GPU{'s' * (count > 1)} for {needed} ranks of this host: start at most {count} here, "
            "let all share one with --device cuda:0, or take --device cpu"
        )
    if index >= count:
        raise ConfigError(f"device is {name}: torch finds {count} here; take a lower number, or --device cpu")
    return torch.device("cuda", index)
