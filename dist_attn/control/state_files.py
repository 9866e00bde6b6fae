"""The last saved state of every open request, in files of this controller; they end with it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import final

import structlog

from dist_attn.control.processes import PrivateFolder
from dist_attn.store.private import make_private
from dist_attn.wire.rank_messages import STATE_PART_BYTES

PREFIX = "dist-attn-states-"

log = structlog.get_logger("dist_attn.control")


@final
class StateFiles:
    """Bytes by request: a new state is written in parts beside the last one, and takes its place when it is committed.

    Several files per request, in a folder of its own. Memory: one part. A full disk keeps no state and breaks nothing.
    """

    def __init__(self, folder: Path) -> None:
        make_private(folder)
        self._own = PrivateFolder(folder, PREFIX)  # of each controller, and gone with it
        self.folder = self._own.path

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
            if path.stat().st_size != num_bytes:
                return False
            path.replace(self._whole(request, ordinal))
        except OSError:
            return False
        return True

    def commit(self, request: int, ordinal: int) -> bool:
        """Let the finished state of that number take the place of the last one; false if it cannot."""
        try:
            self._whole(request, ordinal).replace(self._last(request))
        except OSError:
            return False
        return True

    def begin(self, request: int, start: int, data: bytes) -> bool:
        """Write bytes [start, start + n) of the state that the request begins with; false if they cannot be kept.

        A loss of ranks leaves them.
        """
        try:
            with self._begin(request).open("r+b" if start else "wb") as file:
                file.seek(start)
                file.write(data)
        except OSError as error:
            log.warning("state to begin with is not kept", request=request, error=str(error))
            return False
        return True

    def begun(self, request: int) -> bool:
        """Make the state written by `begin` the request's last one; false if it cannot be."""
        try:
            self._begin(request).replace(self._last(request))
        except OSError:
            return False
        return True

    def offer(self, request: int, ordinal: int) -> bool:
        """Keep the last state under that number, however many follow, until `end_offer`; false if it cannot be.

        It gets another name, or is copied where a file cannot have two.
        """
        offered = self._offered(request, ordinal)
        try:
            offered.hardlink_to(self._last(request))
        except OSError:
            try:
                shutil.copyfile(self._last(request), offered)
            except OSError as error:
                log.warning("state cannot be handed out", request=request, error=str(error))
                return False
        return True

    def offered(self, request: int, ordinal: int, start: int, count: int) -> bytes:
        """Read bytes [start, start + count) of a state that `offer` keeps; fewer if they cannot be read."""
        try:
            with self._offered(request, ordinal).open("rb") as file:
                file.seek(start)
                return file.read(count)
        except OSError as error:
            log.error("state cannot be read", request=request, error=str(error))
            return b""

    def end_offer(self, request: int, ordinal: int) -> None:
        """Remove the name under which `offer` keeps a state."""
        self._offered(request, ordinal).unlink(missing_ok=True)

    def parts(self, request: int) -> Iterator[bytes]:
        """The last state, in parts that fit into messages.

        Where it cannot be read, what is sent is not whole, and the ranks refuse it.
        """
        try:
            with self._last(request).open("rb") as file:
                while part := file.read(STATE_PART_BYTES):
                    yield part
        except OSError as error:
            log.error("state cannot be read", request=request, error=str(error))

    def forget_unfinished(self) -> None:
        """Remove states that were not committed: their ranks are gone."""
        for path in [*self.folder.glob("*.next"), *self.folder.glob("*.whole")]:
            path.unlink(missing_ok=True)

    def drop(self, request: int) -> None:
        """Remove the request's files."""
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

    def _offered(self, request: int, ordinal: int) -> Path:
        return self.folder / f"{request}.{ordinal}.offered"

    def _last(self, request: int) -> Path:
        return self.folder / f"{request}.state"
