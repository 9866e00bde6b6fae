"""The GPU and the assembler that Triton's kernels are compiled for and by.

`dist-attn doctor --compile` names a GPU where there is none, beside a driver of Triton that launches nothing: calls
then take kernels on whatever device they are, and outputs hold anything.

On Hopper GPUs ptxas before CUDA 13.3 may write registers and addresses of shared memory that a product still reads
(Triton's pull request 11781); an H100 so gave wrong gradients, and the same kernels by ptxas 13.5 right ones. So a
newer assembler than Triton brings is taken where the package `nvidia-cuda-nvcc` is installed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

__all__ = ["KernelTarget", "compiling_for", "kernel_target", "packaged_assembler", "use_newest_assembler"]


@dataclass(frozen=True)
class KernelTarget:
    """A GPU by its compute capability, 90 for 9.0, and the name whose record in gpu_record.json says the tiles."""

    capability: int
    name: str = ""


_now: KernelTarget | None = None


def kernel_target() -> KernelTarget | None:
    """The target that is being compiled for, in all threads; None where calls are computed, which is usual."""
    return _now


@contextmanager
def compiling_for(target: KernelTarget) -> Iterator[None]:
    """Compile for this GPU inside."""
    global _now
    before, _now = _now, target
    try:
        yield
    finally:
        _now = before


PACKAGE = "nvidia-cuda-nvcc"


def use_newest_assembler() -> None:
    """Point Triton at the package's, unless TRITON_PTXAS_PATH is set or the driver is too old for what it makes."""
    assembler = packaged_assembler()
    if assembler is not None and int((torch.version.cuda or "0").partition(".")[0]) >= 13:
        os.environ.setdefault("TRITON_PTXAS_PATH", str(assembler))


def packaged_assembler() -> Path | None:
    """The package's ptxas, or None where it is not installed or older than CUDA 13.3."""
    with suppress(PackageNotFoundError, ValueError):  # ValueError: a version that is no row of numbers
        package = distribution(PACKAGE)
        if tuple(map(int, package.version.split(".")[:2])) >= (13, 3):
            found = (Path(str(file.locate())) for file in package.files or () if file.name == "ptxas")
            return next((path for path in found if path.is_file()), None)
    return None
