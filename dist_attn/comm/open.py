"""Find out in which group this process runs and join it.

Ranks that no torchrun brought together find each other at a rendezvous: a file on one host, a store of rank 0 on
several.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from dist_attn.comm.base import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.mpi import MpiCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import CommError, ConfigError
from dist_attn.launchers import read_launch
from dist_attn.wire.choices import BACKENDS

RANK_VARIABLES = ("RANK", "WORLD_SIZE")
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rendezvous:
    """A place that every rank of one group is given, and no other group.

    `url` is file:///PATH, of a file that does not exist yet in a folder that nobody else can read, or tcp://HOST:PORT,
    where rank 0 serves a store. A store asks nobody who they are, so it listens on HOST alone: rank 0 is given the
    descriptor of the socket, `listener`, since torch by itself would listen on all addresses.

    Units: timeout_s in seconds, for all ranks to come.
    """

    url: str
    timeout_s: float
    listener: int | None = None

    def open_store(self, rank: int, size: int) -> Store:
        """The store, once all ranks are there.

        Raises: ConfigError for a `url` of another kind, CommError if ranks are missing after `timeout_s`.
        """
        try:
            store = self._connect(rank, size)
            store.set(f"rank {rank}", "here")
            store.wait([f"rank {other}" for other in range(size)], timedelta(seconds=self.timeout_s))
        except (RuntimeError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise CommError(
                f"rank {rank} of {size} did not meet all other ranks at {self.url} within {self.timeout_s:g} s: "
                f"{reason}; are all ranks started?"
            ) from error
        return store

    def _connect(self, rank: int, size: int) -> Store:
        place = urlsplit(self.url)
        if place.scheme == "file" and place.path:
            return FileStore(url2pathname(place.path), size)
        if place.scheme != "tcp" or not place.hostname or not place.port:
            raise ConfigError(f"ranks cannot meet at {self.url!r}: give file:///PATH or tcp://HOST:PORT")
        listener = self.listener
        if rank == 0 and listener is None:
            listener = socket.create_server((place.hostname, place.port)).detach()
        return TCPStore(
            place.hostname,
            place.port,
            size,
            is_master=rank == 0,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
            use_libuv=False,  # that server takes no socket in torch 2.6
        )


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
    met = rendezvous.open_store(rank, size)
    return TorchDistCommunicator.connect(chosen, timeout_s=timeout_s, device=device, meeting=met, rank=rank, size=size)
