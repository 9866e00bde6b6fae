"""The last saved state of every open session, in files of this controller; they end with it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, final

import structlog

from dist_attn.control.processes import is_alive

__all__ = ["PART_BYTES", "StateFiles", "StateKeeper"]

PART_BYTES = 4 << 20
PREFIX = "dist-attn-states-"

log = structlog.get_logger("dist_attn.control")


class StateKeeper(Protocol):
    """Keeps bytes by session: new states are written in parts beside the last one, and one of them takes its place."""

    def append(self, session: int, rank: int, start: int, data: bytes) -> None:
        """Bytes [start, start + n) of the session's next state from this rank; what does not follow makes it none."""
        ...

    def finish(self, session: int, rank: int, position: int, num_bytes: int) -> bool:
        """What this rank sent is the state at `position`; false, and nothing is kept, if it is not whole."""
        ...

    def commit(self, session: int, position: int) -> bool:
        """Let the finished state of `position` take the place of the last one; false if it cannot."""
        ...

    def parts(self, session: int) -> Iterator[bytes]:
        """The last state, in parts that fit into messages."""
        ...

    def forget_unfinished(self) -> None:
        """The ranks are gone: what was not committed is of no use."""
        ...

    def drop(self, session: int) -> None:
        """The session has ended."""
        ...


@final
class StateFiles:
    """A file per session in a folder of its own. Memory: one part. A full disk keeps no state and breaks nothing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left_over(folder)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder))

    def append(self, session: int, rank: int, start: int, data: bytes) -> None:
        """Write one part."""
        path = self._next(session, rank)
        try:
            with path.open("r+b" if start else "wb") as file:
                if file.seek(0, os.SEEK_END) != start:
                    return
                file.write(data)
        except OSError as error:
            log.warning("state is not kept", session=session, error=str(error))
            path.unlink(missing_ok=True)

    def finish(self, session: int, rank: int, position: int, num_bytes: int) -> bool:
        """Rename what was written, so that the rank's next state may come."""
        path = self._next(session, rank)
        try:
            if not num_bytes:  # there is nothing to keep, and nothing was sent
                path.write_bytes(b"")
            if path.stat().st_size != num_bytes:
                return False
            path.replace(self._whole(session, position))
        except OSError:
            return False
        return True

    def commit(self, session: int, position: int) -> bool:
        """Rename the state over the last one."""
        try:
            self._whole(session, position).replace(self._last(session))
        except OSError:
            return False
        return True

    def parts(self, session: int) -> Iterator[bytes]:
        """Read the last state; where it cannot be read, what is sent is not whole, and the ranks refuse it."""
        try:
            with self._last(session).open("rb") as file:
                while part := file.read(PART_BYTES):
                    yield part
        except OSError as error:
            log.error("state cannot be read", session=session, error=str(error))

    def forget_unfinished(self) -> None:
        """Remove what has not taken the last state's place."""
        for path in [*self.folder.glob("*.next"), *self.folder.glob("*.whole")]:
            path.unlink(missing_ok=True)

    def drop(self, session: int) -> None:
        """Remove the session's files."""
        for path in [*self.folder.glob(f"{session}.*")]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _next(self, session: int, rank: int) -> Path:
        return self.folder / f"{session}.{rank}.next"

    def _whole(self, session: int, position: int) -> Path:
        return self.folder / f"{session}.{position}.whole"

    def _last(self, session: int) -> Path:
        return self.folder / f"{session}.state"


def _remove_left_over(folder: Path) -> None:
    """Remove what controllers that were killed have left."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(ValueError):
            if not is_alive(int(path.name.removeprefix(PREFIX).partition("-")[0])):
                shutil.rmtree(path, ignore_errors=True)
