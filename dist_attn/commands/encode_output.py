"""The output of commands: files that appear when they are complete, rows as .npy, bars of bytes. No torch."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dist_attn.errors import NO_ROOM, InputError, StorageError


@final
class RowFile:
    """A file of float32 [rows, dim] whose number of rows is known at the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._dim: int | None = None
        self._start = 0  # of the first row
        self.rows = 0
        self.finished = False

    def write(self, rows_ND: npt.NDArray[Any], at: int | None = None) -> None:
        """Append rows, or put them where row `at` is to be; all have as many numbers as the first ones."""
        if self._dim is None:
            self._dim = rows_ND.shape[1]
            self._header()
            self._start = self._file.tell()
        if at is not None:
            self._file.seek(self._start + 4 * self._dim * at)
        self._file.write(np.ascontiguousarray(rows_ND, dtype="<f4").tobytes())
        self.rows += len(rows_ND)

    def finish(self) -> None:
        """Say that this was all."""
        self._file.seek(0)
        self._header()
        self.finished = True

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _header(self) -> None:
        # numpy pads the header so that the first dimension can grow in place: the same length for any row count.
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self._dim or 0)}
        np.lib.format.write_array_header_1_0(self._file, header)


class Finishing(Protocol):
    """A writer of a file, which says whether the file is complete."""

    finished: bool

    def close(self) -> None:
        """Let go of the file, complete or not."""


W = TypeVar("W", bound=Finishing)


def row_file(target: Path, source: Path) -> contextlib.AbstractContextManager[RowFile]:
    """A .npy file of the rows of `source`; nothing is left behind when it is not finished.

    Raises: as `file_of`.
    """
    return file_of(target, source, RowFile)


def check_target(target: Path, source: Path) -> None:
    """Raises: InputError where the name is not a file's, or it is that of the text."""
    try:
        if target.exists() and not target.is_file():
            # Renaming onto a device would replace it, /dev/null too.
            raise InputError(f"{target} is a folder or a device; give the name of a file for the rows")
        if target.exists() and os.path.exists(source) and target.samefile(source):
            raise InputError(f"{target} is the text itself, which the rows would replace; give another name for them")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}; its folder must exist") from None


@contextlib.contextmanager
def file_of(target: Path, source: Path, make: Callable[[IO[bytes]], W]) -> Iterator[W]:
    """Open `target` for the rows of `source`, and give the writer that `make` returns; an unfinished file is removed.

    Raises: InputError when there is no folder to write it to, the name is not a file's, or it is that of the text;
        StorageError when the disk has no room for it.
    """
    try:
        check_target(target, source)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.writing")
        file = temporary.open("wb")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}; its folder must exist") from None
    try:
        with file:
            writer = make(file)
            try:
                yield writer
            finally:
                writer.close()
        if writer.finished:
            temporary.rename(target)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise StorageError(
            f"{target} cannot be written: {error.strerror}; make room there, or name a file elsewhere"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def byte_progress(title: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes done so far; it draws only if `enabled` and stderr is a terminal."""
    with bytes_progress((title,), total, enabled=enabled) as (report,):
        yield report


@contextlib.contextmanager
def bytes_progress(
    titles: Sequence[str], total: int, *, enabled: bool = True
) -> Iterator[Sequence[Callable[[int], None]]]:
    """Functions that take the bytes done so far, one for each title; each draws a bar, and `total` is that of all."""
    if not enabled or not sys.stderr.isatty():
        yield [lambda _: None] * len(titles)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = [progress.add_task(title, total=total) for title in titles]
        yield [partial(_completed, progress, task) for task in tasks]


def _completed(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)
