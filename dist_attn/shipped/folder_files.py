"""Files of model folders, which may come from anywhere: regular ones alone are read, and none without a bound.

And files that are written whole or not at all.
"""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from dist_attn.errors import ModelFolderError

__all__ = ["MOST_BYTES", "find_json_object", "open_file", "put_in_place", "read_file", "read_json", "read_json_object"]

MOST_BYTES: Final = 1 << 27
"""The most bytes of a file read as a whole; tokenizer.json is the largest and has some 35 MB with 262,144 tokens."""
_KINDS: Final = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, or one that a link leads to, to be read; nothing is waited for.

    Raises: ModelFolderError for one that is not there, cannot be read, or is of another kind.
    """
    try:
        _require_regular(path, os.stat(path))  # opening a device may do something to it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        file = os.fdopen(descriptor, "rb")
        try:
            _require_regular(path, os.fstat(descriptor))
        except ModelFolderError:
            file.close()
            raise
        return file
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None


def _require_regular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise ModelFolderError(f"{path} is {kind}; needed is a regular file")


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read the whole contents of a file.

    Raises: ModelFolderError as `open_file`, and for more than `most_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ModelFolderError(f"{path} has {size:,} bytes; needed are at most {most_bytes:,}")
        try:
            return file.read(size)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Read the value of a JSON file.

    Raises: ModelFolderError as `read_file`, and for a file that is no JSON.
    """
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{path} is not JSON: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises: ModelFolderError for a file that cannot be read or holds anything but a JSON object."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ModelFolderError(f"{path} holds no JSON object; needed is one")
    return values


def find_json_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object as `read_json_object`; None where there is no file."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # of a folder that may not be searched: reading says so
        pass
    return read_json_object(path)


def put_in_place(path: Path, contents: bytes) -> None:
    """Write a file that others see whole or not at all."""
    writing = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        writing.write_bytes(contents)
        writing.replace(path)
    finally:
        writing.unlink(missing_ok=True)
