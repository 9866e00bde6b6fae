"""The last saved state of every open request, in files of this controller; they end with it.

States that requests begin with come from the store, and those that are handed out go there, in threads of their own.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar, final

import structlog

from dist_attn.control.processes import PrivateFolder
from dist_attn.control.store_workers import StoreWorkers
from dist_attn.errors import StateDamagedError, StorageError
from dist_attn.store.ports import PIECE_BYTES, Blobs, new_name
from dist_attn.store.private import make_private
from dist_attn.wire.messages import BeginState
from dist_attn.wire.rank_messages import STATE_PART_BYTES
from dist_attn.wire.snapshot import SnapshotHeader, SnapshotParser

PREFIX = "dist-attn-states-"
RETRY_S = 5.0  # while the store cannot tell its name
T = TypeVar("T")
Then = Callable[[T | Exception], None]

log = structlog.get_logger("dist_attn.control")


class StoredBlob(NamedTuple):
    """A state in the store: the name of its blob, its SHA-256 in hex and its size."""

    name: str
    digest: str
    num_bytes: int


@final
class StateFiles:
    """Bytes by request: a new state is written in parts beside the last one, and takes its place when it is committed.

    Several files per request, in a folder of its own. Memory: one part. A full disk keeps no state and breaks nothing.
    """

    def __init__(self, folder: Path, store: StoreWorkers) -> None:
        make_private(folder)
        self._own = PrivateFolder(folder, PREFIX)  # of each controller, and gone with it
        self.folder = self._own.path
        self._store = store
        self._given_up: dict[int, Event] = {}  # by request, of the copy from or to the store that was begun last
        self.place = ""
        """The name of the place of the stored states, once it is known."""
        store.run(lambda blobs: blobs.place(), self._found)

    def append(self, request: int, ordinal: int, start: int, data: bytes) -> None:
        """Write bytes [start, start + n) of a new state; bytes that do not follow are dropped, and `finish` fails."""
        path = self._next(request, ordinal)
        try:
            with path.open("r+b" if start else "wb") as file:
                if file.seek(0, os.SEEK_END) != start:
                    return
                file.write(data)
        except OSError as error:
            log.warning("state is not kept", request=request, error=str(error))
            path.unlink(missing_ok=True)

    def finish(self, request: int, ordinal: int, num_bytes: int) -> bool:
        """Note that all of a new state has come; false, and nothing is kept, if it is not whole."""
        path = self._next(request, ordinal)
        try:
            if not num_bytes:  # there is nothing to keep, and nothing was sent
                path.write_bytes(b"")
            whole = path.stat().st_size == num_bytes
        except OSError:
            return False
        return whole and _moved(path, self._whole(request, ordinal))

    def commit(self, request: int, ordinal: int) -> bool:
        """Let the finished state of that number take the place of the last one; false if it cannot."""
        return _moved(self._whole(request, ordinal), self._last(request))

    # ---- to and from the store -----------------------------------------------------------------

    def fetch(self, request: int, begin: BeginState, max_bytes: int, then: Then[SnapshotHeader]) -> None:
        """Copy the state that the request begins with from the store, and check it; a loss of ranks leaves it.

        `then` gets its header, or a StorageError, WireError or another exception; `max_bytes` as for SnapshotParser.
        """
        given_up = self._given_up[request] = Event()
        self._store.run(partial(_fetch, begin, self._begin(request), max_bytes, given_up), then, given_up)

    def begun(self, request: int) -> bool:
        """Make the state that was fetched the request's last one; false if it cannot be."""
        return _moved(self._begin(request), self._last(request))

    def hold(self, request: int, ordinal: int) -> bool:
        """Keep the last state under that number, however many follow, until it is stored; false if it cannot be.

        It gets another name, or is copied where a file cannot have two.
        """
        held = self._held(request, ordinal)
        try:
            held.hardlink_to(self._last(request))
        except OSError:
            try:
                shutil.copyfile(self._last(request), held)
            except OSError as error:
                log.warning("state cannot be handed out", request=request, error=str(error))
                return False
        return True

    def put(self, request: int, ordinal: int, then: Then[StoredBlob]) -> None:
        """Write a state that `hold` keeps to the store, durably; `then` gets its blob, or an exception."""
        given_up = self._given_up[request] = Event()
        self._store.run(partial(_put, self._held(request, ordinal), given_up), then, given_up, self._came_late)

    def discard(self, blob: str) -> None:
        """Delete a state in the store that nobody was told of; upkeep does where this fails."""
        self._store.run(lambda blobs: blobs.delete(blob), lambda _: None)

    def _came_late(self, stored: StoredBlob | Exception) -> None:
        if isinstance(stored, StoredBlob):
            self.discard(stored.name)

    def _found(self, place: str | Exception) -> None:
        if isinstance(place, str):
            self.place = place
        else:
            log.warning("the store does not answer", error=str(place))
            self._store.run(_place_later, self._found)

    # ---- to the ranks --------------------------------------------------------------------------

    def parts(self, request: int) -> Iterator[bytes]:
        """The last state, in parts that fit into messages.

        Where it cannot be read, what is sent is not whole, and the ranks refuse it.
        """
        try:
            yield from _pieces(self._last(request), STATE_PART_BYTES)
        except OSError as error:
            log.error("state cannot be read", request=request, error=str(error))

    def forget_unfinished(self) -> None:
        """Remove states that were not committed: their ranks are gone."""
        for path in [*self.folder.glob("*.next"), *self.folder.glob("*.whole")]:
            path.unlink(missing_ok=True)

    def drop(self, request: int) -> None:
        """Remove the request's files, and give up what is under way from or to the store."""
        if given_up := self._given_up.pop(request, None):
            given_up.set()
        for path in [*self.folder.glob(f"{request}.*")]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder with all its files."""
        self._own.remove()

    def _next(self, request: int, ordinal: int) -> Path:
        return self.folder / f"{request}.{ordinal}.next"

    def _whole(self, request: int, ordinal: int) -> Path:
        return self.folder / f"{request}.{ordinal}.whole"

    def _begin(self, request: int) -> Path:
        return self.folder / f"{request}.begin"

    def _held(self, request: int, ordinal: int) -> Path:
        return self.folder / f"{request}.{ordinal}.held"

    def _last(self, request: int) -> Path:
        return self.folder / f"{request}.state"


async def _fetch(begin: BeginState, file: Path, max_bytes: int, given_up: Event, blobs: Blobs) -> SnapshotHeader:
    """Copy a stored state to a file, and check it there, where its digest is known; a thread of its own does this."""
    digest, left = hashlib.sha256(), begin.num_bytes
    with open(file, "wb") as copy:  # noqa: ASYNC230
        async for piece in blobs.read(begin.blob):
            _go_on(given_up)
            digest.update(piece)
            left -= len(piece)
            if left < 0:
                break
            copy.write(piece)
    if left or digest.hexdigest() != begin.digest:
        raise StateDamagedError(
            f"the state at {begin.position} is damaged: its bytes are not those that were stored; go on from another "
            "checkpoint, or read the text again into a new session"
        )
    parser = SnapshotParser(max_bytes=max_bytes)
    for piece in _pieces(file):
        parser.feed(piece)
    return parser.finish().header


async def _put(file: Path, given_up: Event, blobs: Blobs) -> StoredBlob:
    """Write a file to the store as a new blob, and remove it."""
    name, digest, size = new_name(time.time()), hashlib.sha256(), 0

    async def measured() -> AsyncIterator[bytes]:
        nonlocal size
        for piece in _pieces(file):
            _go_on(given_up)
            digest.update(piece)
            size += len(piece)
            yield piece

    await blobs.write(name, measured())
    with contextlib.suppress(FileNotFoundError):  # it was dropped meanwhile
        os.unlink(file)
    return StoredBlob(name, digest.hexdigest(), size)


def _go_on(given_up: Event) -> None:
    if given_up.is_set():
        raise StorageError("nobody waits for this state any more")


async def _place_later(blobs: Blobs) -> str:
    await asyncio.sleep(RETRY_S)
    return await blobs.place()


def _moved(file: Path, to: Path) -> bool:
    """Give a file another name, in place of the file that has it; return whether that was possible."""
    try:
        file.replace(to)
    except OSError:
        return False
    return True


def _pieces(file: Path, size: int = PIECE_BYTES) -> Iterator[bytes]:
    with file.open("rb") as state:
        while piece := state.read(size):
            yield piece
