"""The assembler of Triton's kernels: a newer one than Triton brings, where the package `nvidia-cuda-nvcc` is installed.

On Hopper GPUs ptxas before CUDA 13.3 may write registers and addresses of shared memory that a product still reads
(Triton's pull request 11781); an H100 so gave wrong gradients, and the same kernels by ptxas 13.5 right ones.
"""

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

__all__ = ["packaged_assembler", "use_newest_assembler"]

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
