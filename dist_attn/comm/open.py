"""Find out in which group this process runs and join it."""

import os
from collections.abc import Mapping

import torch

from dist_attn.comm.base import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import ConfigError

__all__ = ["BACKENDS", "open_communicator"]

BACKENDS = ("local", "gloo", "nccl")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def open_communicator(
    backend: str | None = None, timeout_s: float = 30.0, device: torch.device | str | None = None
) -> Communicator:
    """The communicator of this process: alone it is local, under torchrun it joins the other ranks.

    Without a `backend`, a CUDA `device` means nccl and anything else gloo. `timeout_s` bounds every wait.

    Units: timeout_s in seconds.
    Raises: ConfigError for a back end that is unknown or does not fit how the process was started; CommError if the
    ranks do not come together in time.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"unknown back end {backend!r}; choose one of {', '.join(BACKENDS)}")
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s:g}; a wait needs a deadline of more than 0 seconds")
    size = _started_ranks(os.environ)
    if backend == "local" and size > 1:
        raise ConfigError(f"back end local is for one rank, but {size} were started; choose gloo or nccl")
    if backend == "local" or (backend is None and size == 1):
        return LocalCommunicator()
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"back end {backend or 'gloo'} needs {', '.join(missing)} in the environment: start the ranks with "
            "`torchrun --nproc-per-node N -m dist_attn …`"
        )
    place = torch.device(device) if device is not None else None
    chosen = backend or ("nccl" if place is not None and place.type == "cuda" else "gloo")
    if chosen == "nccl":
        place = place or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if place.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"back end nccl needs a CUDA device, got {place}; use gloo on CPUs")
    else:
        place = torch.device("cpu")
    return TorchDistCommunicator.connect(chosen, timeout_s=timeout_s, device=place)


def _started_ranks(environ: Mapping[str, str]) -> int:
    """How many ranks were started together with this process.

    Raises: ConfigError for a count that cannot be read, or for ranks started by mpiexec.
    """
    if "WORLD_SIZE" not in environ:
        for name in MPI_SIZE_VARIABLES:
            if environ.get(name, "1") != "1":
                raise ConfigError(
                    f"mpiexec started {environ[name]} ranks, but this version has no MPI back end: start them with "
                    "`torchrun --nproc-per-node N -m dist_attn …`"
                )
        return 1
    try:
        size = int(environ["WORLD_SIZE"])
    except ValueError:
        size = 0
    if size < 1:
        raise ConfigError(f"WORLD_SIZE is {environ['WORLD_SIZE']!r}; it must be the number of ranks, 1 or more")
    return size
