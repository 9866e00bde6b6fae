"""The sources of text: plain files, folders of them, and `.jsonl`; each also gzipped. What is unusable is named."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from dist_attn.errors import ConfigError

__all__ = ["OnRead", "beginning", "documents", "expand", "field", "is_jsonl", "lines", "records"]

PIECE_BYTES = 1 << 20

OnRead = Callable[[int], None]
"""A function that is told how many bytes of a file on disk have been read so far."""


def expand(paths: Sequence[Path]) -> tuple[Path, ...]:
    """List the files that these paths name: a folder stands for all *.txt in it and below, sorted by their path.

    Raises: ConfigError for a folder without such a file, and for a pipe.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_fifo() or path.is_socket():
            raise ConfigError(
                f"training text {path} is no file; it is read more than once, so write it to a file first"
            )
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(path.rglob("*.txt"))
        if not inside:
            raise ConfigError(f"folder {path} has no *.txt; give a folder of texts, or files")
        files += inside
    return tuple(files)


def documents(path: Path, text_field: str, on_read: OnRead = lambda _: None) -> Iterator[Iterator[bytes]]:
    """Read the documents of a file, each as pieces of bytes: one of a text, one for each line of `.jsonl` (also `.gz`).

    The pieces of a document are taken before the next document is asked for.

    Raises: ConfigError naming file and line.
    """
    if not is_jsonl(path):
        yield _pieces(path, on_read)
        return
    for number, record in records(path, on_read):
        yield iter([field(record, text_field, str, path, number).encode(errors="surrogatepass")])


def is_jsonl(path: Path) -> bool:
    """Return whether a file's name says that every line of it is a JSON object."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


def records(path: Path, on_read: OnRead = lambda _: None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the JSON objects of a file, each with the number of its line; blank lines are passed over.

    Raises: ConfigError naming file and line.
    """
    for number, line in lines(path, on_read):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number} is {type(record).__name__}; needed is one JSON object per line")
        yield number, record


def field(record: dict[str, Any], name: str, kind: type | tuple[type, ...], path: Path, number: int) -> Any:
    """Take a field of a record.

    Raises: ConfigError where it is missing or of another kind, naming file and line.
    """
    if name not in record:
        known = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f"{path}, line {number} has no field {name!r}, only {known}; name the field in [data]")
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConfigError(f"{path}, line {number}: {name!r} is {type(value).__name__}; needed is {kinds}")
    return value


def lines(path: Path, on_read: OnRead = lambda _: None) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file without their ends, counted from 1.

    Raises: ConfigError for a file that cannot be read.
    """
    with _opened(path) as (file, on_disk):
        for number, line in enumerate(file, 1):
            yield number, line.rstrip(b"\r\n")
            on_read(on_disk.tell())


def beginning(path: Path, count: int, what: str) -> bytes:
    """Read the first `count` bytes of a text, or all where it has fewer.

    Raises: ConfigError for a file that cannot be read; `what` says what it is.
    """
    with _opened(path, what) as (file, _):
        return file.read(count)


def _pieces(path: Path, on_read: OnRead) -> Iterator[bytes]:
    with _opened(path) as (file, on_disk):
        while piece := file.read(PIECE_BYTES):
            yield piece
            on_read(on_disk.tell())


@contextmanager
def _opened(path: Path, what: str = "training text") -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, unpacked where it is gzipped, and as it is on disk; trouble is a ConfigError with its name."""
    try:
        with path.open("rb") as on_disk:
            unpacked = gzip.GzipFile(fileobj=on_disk) if path.suffix == ".gz" else on_disk
            yield cast(IO[bytes], unpacked), on_disk
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends too early"
        raise ConfigError(f"{what} {path} cannot be read: {reason}") from None
