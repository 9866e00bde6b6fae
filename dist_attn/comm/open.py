"""The joining of a process to its group of ranks, which it finds out from its environment.

Ranks that no torchrun brought together find each other at a rendezvous: a file on one host, a store of rank 0 on
several.
"""

import os
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as torchrun_rendezvous

from dist_attn.comm.base import Communicator
from dist_attn.comm.call import first_line
from dist_attn.comm.local import LocalCommunicator
from dist_attn.comm.mpi import MpiCommunicator
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.errors import CommError, ConfigError
from dist_attn.launchers import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, MEETING_VARIABLE, place_on_host, read_launch
from dist_attn.wire.choices import BACKENDS

RANK_VARIABLES = ("RANK", "WORLD_SIZE")
CPU = torch.device("cpu")
# For ranks of one command to load what they need; whoever started them ends all when one is lost meanwhile.
MEETING_S = 300.0
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
        """Open the store, once all ranks are there.

        Raises: ConfigError for a `url` of another kind, CommError if ranks are missing after `timeout_s`.
        """
        try:
            store = self._connect(rank, size)
            store.set(f"rank {rank}", "here")
            store.wait([f"rank {other}" for other in range(size)], timedelta(seconds=self.timeout_s))
        except (RuntimeError, OSError) as error:
            raise _not_met(rank, size, self.timeout_s, f"at {self.url}", error) from error
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
    """Make the communicator of this process: alone it is local, under torchrun or mpiexec it joins the other ranks.

    Without a `backend` (or with "auto"), mpiexec means mpi; other ranks take nccl where each has a CUDA `device` of its
    own, and gloo where several share one, or compute on CPUs. `timeout_s` bounds every wait. Ranks that were started
    with RANK and WORLD_SIZE alone, without torchrun, meet at a `rendezvous`.

    Units: timeout_s in seconds.
    Raises: ConfigError for a back end that is unknown or does not fit how the process was started, and for ranks of
    which some compute on GPUs and some on CPUs; CommError if the ranks do not come together in time; MissingExtraError
    if mpi4py is needed and not installed.
    """
    backend = None if backend == "auto" else backend
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
    if rendezvous is None and MEETING_VARIABLE in os.environ:
        rendezvous = Rendezvous(os.environ[MEETING_VARIABLE], MEETING_S)
    needed = TORCHRUN_VARIABLES if rendezvous is None else RANK_VARIABLES
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ConfigError(
            f"back end {backend or 'gloo'} needs {', '.join(missing)} in the environment: start the ranks with "
            "`dist-attn … --ranks N`, or by torchrun"
        )
    return _join(backend, timeout_s, torch.device(device) if device is not None else None, rendezvous)


def _join(
    backend: str | None, timeout_s: float, device: torch.device | None, rendezvous: Rendezvous | None
) -> Communicator:
    if device is None:
        place = place_on_host(os.environ)
        device = CPU if backend != "nccl" else torch.device("cuda", 0 if place is None else place[0])
    if backend == "nccl" and (device.type != "cuda" or not torch.cuda.is_available()):
        raise ConfigError(f"back end nccl needs a CUDA device, got {device}; use gloo on CPUs")
    rank, size = (int(os.environ[name]) for name in RANK_VARIABLES)
    if dist.is_initialized():  # as FSDP makes a group
        chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
        return TorchDistCommunicator.connect(chosen, timeout_s=timeout_s, device=device if chosen == "nccl" else CPU)
    store = _torchrun_store(rank, size, timeout_s) if rendezvous is None else rendezvous.open_store(rank, size)
    chosen = _backend_between(_places_of_ranks(store, rank, size, device, timeout_s), backend)
    device = device if chosen == "nccl" else CPU
    return TorchDistCommunicator.connect(
        chosen, timeout_s=timeout_s, device=device, meeting=store, rank=rank, size=size
    )


def _torchrun_store(rank: int, size: int, timeout_s: float) -> Store:
    timeout, listener = timedelta(seconds=timeout_s), None
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # all ranks are on this host
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, LOOPBACK_INTERFACE)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _listen_as_master(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    try:
        if listener is not None:
            host, port = listener.getsockname()
            return TCPStore(
                host,
                port,
                size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
                use_libuv=False,
            )
        store: Store = next(torchrun_rendezvous("env://", rank, size, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        raise _not_met(rank, size, timeout_s, "where torchrun says", error) from error
    return store


def _listen_as_master(host: str, port: str) -> socket.socket | None:
    """Open the socket of rank 0's store on that address alone, where torch would listen on all of them.

    None where the address is not this host's own, or a name that only this host takes for loopback, as in Debian's
    /etc/hosts: torch then does as it does, and says what is wrong.
    """
    with suppress(OSError, ValueError, OverflowError):
        address = socket.gethostbyname(host)
        if not address.startswith("127.") or host in (address, "localhost"):
            return socket.create_server((address, int(port)))
    return None


def _places_of_ranks(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> list[str]:
    """Gather the device of each rank: "cpu", or the GPU's name among all that there are."""
    known = PrefixStore("device", store)
    known.set_timeout(timedelta(seconds=timeout_s))
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
    try:
        known.set(str(rank), f"{device} {uuid} on {socket.gethostname()}" if uuid else device.type)
        return [known.get(str(other)).decode() for other in range(size)]
    except RuntimeError as error:
        raise _not_met(rank, size, timeout_s, "where they tell their devices", error) from error


def _backend_between(places: list[str], backend: str | None) -> str:
    """Choose the back end between ranks that compute at these places.

    Raises: ConfigError for GPUs beside CPUs, and for nccl between ranks that share a GPU.
    """
    kinds = {place.partition(":")[0]: rank for rank, place in enumerate(places)}
    if len(kinds) > 1:
        words = ", ".join(f"rank {rank} on {places[rank]}" for rank in sorted(kinds.values()))
        raise ConfigError(f"ranks compute on different devices, {words}: give each a GPU, or all of them --device cpu")
    # The same GPU may have another index in each process.
    shared = [place for place, count in Counter(place.partition(" ")[2] for place in places).items() if count > 1]
    if "cuda" in kinds and shared and backend == "nccl":
        raise ConfigError(f"several ranks share the GPU {shared[0]}, and NCCL takes one rank for each: take gloo")
    return backend or ("nccl" if "cuda" in kinds and not shared else "gloo")


def _not_met(rank: int, size: int, timeout_s: float, place: str, error: Exception) -> CommError:
    return CommError(
        f"rank {rank} of {size} did not meet all other ranks {place} within {timeout_s:g} s: {first_line(error)}; "
        "are all ranks started?"
    )
