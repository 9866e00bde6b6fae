"""The document that a client sends: a text, bytes, a file, or a stream, which can be sent again from any byte on."""

import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Protocol, TypeVar, cast, final

from dist_attn_api.errors import InputError

PIECE_BYTES = 1 << 18
MEMORY_BYTES = 1 << 23  # of a stream's copy, before the disk is used
DOCUMENTS = {
    ".pdf": "application/pdf",
    ".epub": "application/epub+zip",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".html": "text/html",
    ".htm": "text/html",
}
"""The media types of files whose text the service takes out, by the ends of their names."""
T = TypeVar("T")

Document = str | bytes | os.PathLike[str] | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""A text (`str`), bytes, the path of a file (`Path`), a binary file, or an iterable of bytes.

The asynchronous client also takes an asynchronous iterable.
"""


class Blocking(Protocol):
    """A way to run work that may wait for a disk, without holding anything else up."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """The result of `work`."""


@final
class Source:
    """A document that can be opened again, at any byte, after a connection was lost.

    A stream can be read only once, so what was read of it is kept, in memory up to 8 MiB and then in a temporary
    file. `size` is None where it is not known before the end. `close` forgets the copy; files of the caller stay open.

    Raises: InputError for a name that is given as a text, a file that cannot be read, or text where bytes were needed.
    """

    def __init__(self, document: Document) -> None:
        self._memory: bytes | None = None
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._rest: Iterator[bytes] | AsyncIterator[bytes] | None = None
        self._copy: IO[bytes] | None = None
        self._begin = 0
        self.size: int | None = None
        self.media_type = "application/octet-stream"
        self.name = "upload"
        match document:
            case str():
                _refuse_name(document)
                self.media_type = "text/plain"
                self._memory = document.encode()
            case bytes() | bytearray() | memoryview():
                self._memory = bytes(document)
            case os.PathLike():
                self._take_path(Path(document))
            case _ if hasattr(document, "read"):
                self._take_file(cast("IO[bytes]", document))
            case AsyncIterable():
                self._rest = aiter(document)
            case Iterable():
                self._rest = iter(document)
            case _:
                raise InputError(f"a {type(document).__name__} was given; give a text, bytes, a Path, or a binary file")
        if self._memory is not None:
            self.size = len(self._memory)

    async def pieces(self, blocking: Blocking, start: int = 0) -> AsyncGenerator[bytes, None]:
        """The document from byte `start` on; one such reading at a time.

        Raises: InputError for a file that cannot be read.
        """
        if self._memory is not None:
            for at in range(start, len(self._memory), PIECE_BYTES):
                yield self._memory[at : at + PIECE_BYTES]
        elif self._path is not None:
            path = self._path
            file = await blocking(lambda: _opened(path, start))
            try:
                while piece := await blocking(lambda: file.read(PIECE_BYTES)):
                    yield piece
            finally:
                file.close()
        elif self._file is not None:
            file, at = self._file, self._begin + start
            await blocking(lambda: file.seek(at))
            while piece := await blocking(lambda: file.read(PIECE_BYTES)):
                yield _checked(piece)
        else:
            async for piece in self._streamed(blocking, start):
                yield piece

    async def measure(self, blocking: Blocking) -> int:
        """The number of bytes; a stream is read to its end for that."""
        if self.size is None:
            size = 0
            async for piece in self.pieces(blocking):
                size += len(piece)
            self.size = size
        return self.size

    def close(self) -> None:
        """Forget the copy of a stream."""
        if self._copy is not None:
            self._copy.close()

    async def _streamed(self, blocking: Blocking, start: int) -> AsyncIterator[bytes]:
        """Yield the bytes that were read before, from their copy, and then those that still come."""
        if self._copy is None:
            self._copy = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - `close` closes it
        copy, at = self._copy, start
        kept = await blocking(lambda: copy.seek(0, os.SEEK_END))
        while at < kept:
            piece = await blocking(partial(_read_at, copy, at, min(PIECE_BYTES, kept - at)))
            at += len(piece)
            yield piece
        while (new := await self._next(blocking)) is not None:
            await blocking(partial(_append, copy, new))
            kept += len(new)
            if kept > at:
                yield new[max(0, len(new) - (kept - at)) :]
                at = kept

    async def _next(self, blocking: Blocking) -> bytes | None:
        """The next piece of a stream, None at its end."""
        rest = self._rest
        if rest is None:
            return None
        if isinstance(rest, AsyncIterator):
            piece = await anext(rest, None)
        else:
            piece = await blocking(lambda: next(rest, None))
        if piece is None:
            self._rest = None
            return None
        return _checked(piece)

    def _take_path(self, path: Path) -> None:
        try:
            if path.is_file():
                self.size = path.stat().st_size
                self._path = path
            elif path.exists() and not path.is_dir():
                # A pipe or a device cannot be read twice.
                self._rest = _until_end(path)
            else:
                _opened(path, 0).close()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        self.name = path.name
        self.media_type = DOCUMENTS.get(path.suffix.lower(), self.media_type)

    def _take_file(self, file: IO[bytes]) -> None:
        try:
            self._begin = file.tell()
            self.size = file.seek(0, os.SEEK_END) - self._begin
            file.seek(self._begin)
            self._file = file
        except (OSError, AttributeError):
            self._rest = iter(lambda: _checked(file.read(PIECE_BYTES)), b"")


def _refuse_name(text: str) -> None:
    """Refuse a short text that names an existing file: the file is almost surely meant. Raises: InputError."""
    if len(text) < 1024 and "\n" not in text and "\0" not in text and os.path.isfile(text):
        raise InputError(
            f"{text!r} is a text of {len(text)} characters, and there is a file of that name: give Path({text!r}) for "
            "the file, or the text as bytes"
        )


def _until_end(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _opened(path: Path, start: int) -> IO[bytes]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    file.seek(start)
    return file


def _read_at(file: IO[bytes], at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _append(file: IO[bytes], piece: bytes) -> None:
    file.seek(0, os.SEEK_END)
    file.write(piece)


def _checked(piece: bytes) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise InputError(f"the stream gave a {type(piece).__name__}; needed are bytes: open the file with mode 'rb'")
    return bytes(piece)
