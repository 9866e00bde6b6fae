"""Where ranks find each other that no torchrun brought together: a file on one host, a store of rank 0 on several."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit
from urllib.request import url2pathname

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from dist_attn.errors import CommError, ConfigError

__all__ = ["Rendezvous"]


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
