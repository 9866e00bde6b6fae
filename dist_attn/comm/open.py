"""Find out in which group this process runs and join it."""

import os

import torch

from dist_attn.comm.base import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.mpi import MpiCommunicator
from dist_attn.comm.rendezvous import Rendezvous
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import ConfigError
from dist_attn.launchers import read_launch
from dist_attn.wire.choices import BACKENDS

__all__ = ["open_communicator"]

RANK_VARIABLES = ("RANK", "WORLD_SIZE")
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")


def open_communicator(
    backend: str | None = None,
    timeout_s: float = 30.0,
    device: torch.device | str | None = None,
    rendezvous: Rendezvous | None = None,
) -> Communicator:
    """The communicator of this process: alone it is local, under torchrun or mpiexec it joins the other ranks.

    Without a `backend`, mpiexec means mpi; under torchrun a CUDA `device` means nccl and anything else gloo.
    `timeout_s` bounds every wait. Ranks that were started with RANK and WORLD_SIZE alone, without torchrun, meet at a
    `rendezvous`.

    Units: timeout_s in seconds.
    Raises: ConfigError for a back end that is unknown or does not fit how the process was started; CommError if the
    ranks do not come together in time; MissingExtraError if mpi4py is needed and not installed.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"unknown back end {backend!r}; choose one of {', '.join(BACKENDS)}")
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s:g}; a wait needs a deadline of more than 0 seconds")
    launch = read_launch(os.environ)
    size = launch.size if launch is not None else 1
    if backend == "local" and size is not None and size > 1:
        raise ConfigError(f"back end local is for one rank, but {size} were started; choose gloo, nccl or mpi")
    if backend == "local" or (backend is None and size == 1):
        return LocalCommunicator()
    if backend == "mpi" or (backend is None and launch is not None and launch.launcher == "mpiexec"):
        return MpiCommunicator.connect(timeout_s=timeout_s)
    needed = TORCHRUN_VARIABLES if rendezvous is None else RANK_VARIABLES
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(
            f"back end {backend or 'gloo'} needs {', '.join(missing)} in the environment: start the ranks with "
            "`torchrun --nproc-per-node N -m dist_attn …`"
        )
    return _join(backend, timeout_s, torch.device(device) if device is not None else None, rendezvous)


def _join(
    backend: str | None, timeout_s: float, device: torch.device | None, rendezvous: Rendezvous | None
) -> Communicator:
    chosen = backend or ("nccl" if device is not None and device.type == "cuda" else "gloo")
    if chosen == "nccl":
        device = device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"back end nccl needs a CUDA device, got {device}; use gloo on CPUs")
    else:
        device = torch.device("cpu")
    if rendezvous is None:
        return TorchDistCommunicator.connect(chosen, timeout_s=timeout_s, device=device)
    rank, size = (int(os.environ[name]) for name in RANK_VARIABLES)
    store = rendezvous.open_store(rank, size)
    return TorchDistCommunicator.connect(chosen, timeout_s=timeout_s, device=device, store=store, rank=rank, size=size)
