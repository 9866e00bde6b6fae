"""Tokens on disk, memory-mapped: texts one after the other, made once and kept under a name that depends on them."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError, StorageError
from dist_attn.shipped.folder_files import put_in_place
from dist_attn.text import Tokeniser
from dist_attn.training.datasets.text_sources import OnRead

__all__ = [
    "Progress",
    "TokenTable",
    "cached_texts",
    "digest_of",
    "nothing_shown",
    "reading",
    "tokens_of",
]

Progress = Callable[[str, int, int], None]
"""A function that is told what is being made ready, how much of it is done, and how much there is."""

_TELL_EVERY_S = 0.2
# numpy reads a file's head with Python's parser, which in Python 3.11 fails now and then where two threads use it.
_PARSING = threading.Lock()


def nothing_shown(what: str, done: int, total: int) -> None:
    """Show nothing, as a `Progress`."""


@dataclass(frozen=True)
class TokenTable:
    """Texts as tokens: text i is tokens[offsets[i] : offsets[i + 1]]."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens in each text."""
        return np.diff(self.offsets)


def digest_of(paths: Sequence[Path], *settings: str) -> str:
    """Name what is made of these files under these settings: the name changes when a byte of either does.

    Raises: ConfigError for a file that cannot be read.
    """
    digest = hashlib.sha256("\0".join(settings).encode())
    for path in paths:
        try:
            digest.update("".join(path.suffixes[-2:]).encode())  # how a file is read
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(
                f"training text {path} cannot be read: {error.strerror}; [data] says where it is, seen from the folder "
                "that the command is started in, and `--set data.KEY=VALUE` names another place"
            ) from None
    return digest.hexdigest()[:16]


def cached_texts(folder: Path, name: str, texts: Callable[[], Iterable[NDArray[np.int32]]]) -> TokenTable:
    """Take the texts that `name` stands for from the cache, else from `texts()`, whose tokens go to disk as they come.

    Files appear whole or not at all; processes that make the same ones at once put the same bytes in the same place.
    Files that something else has damaged are made again.

    Raises: StorageError where they cannot be written; what `texts()` raises.
    """
    tokens, offsets = folder / f"{name}.tokens", folder / f"{name}.offsets.npy"
    ends_N = _ends_of_whole(tokens, offsets)
    if ends_N is None:
        try:
            _make(tokens, offsets, texts())
        except OSError as error:
            raise StorageError(
                f"the tokens of the texts could not be written into {folder}: {error.strerror}; "
                "make room and start again"
            ) from None
        ends_N = _load_ends(offsets)
    if not ends_N[-1]:  # an empty file cannot be mapped
        return TokenTable(np.empty(0, dtype=np.int32), ends_N)
    return TokenTable(np.memmap(tokens, dtype="<i4", mode="r"), ends_N)


def _ends_of_whole(tokens: Path, offsets: Path) -> NDArray[np.int64] | None:
    """Read the ends of the texts, if both files are there and whole: a crash of the machine may leave half of one."""
    try:
        ends_N = _load_ends(offsets)
        whole = ends_N.ndim == 1 and len(ends_N) > 0 and tokens.stat().st_size == 4 * int(ends_N[-1])
    except (OSError, ValueError, EOFError):
        return None
    return ends_N if whole else None


def _load_ends(offsets: Path) -> NDArray[np.int64]:
    with _PARSING:
        ends_N: NDArray[np.int64] = np.load(offsets, mmap_mode="r", allow_pickle=False)
    return ends_N


def _make(tokens: Path, offsets: Path, texts: Iterable[NDArray[np.int32]]) -> None:
    tokens.parent.mkdir(parents=True, exist_ok=True)
    writing = tokens.with_name(f".{tokens.stem}.{os.getpid()}.writing")
    try:
        ends = [0]
        with writing.open("wb") as file:
            for text in texts:
                file.write(text.astype("<i4", copy=False).tobytes())
                ends.append(ends[-1] + len(text))
        writing.replace(tokens)
    finally:
        writing.unlink(missing_ok=True)
    contents = BytesIO()
    np.save(contents, np.array(ends, dtype=np.int64))
    put_in_place(offsets, contents.getvalue())


def tokens_of(tokeniser: Tokeniser, pieces: Iterable[bytes]) -> Iterator[NDArray[np.int32]]:
    """Tokenise a document that comes in pieces; the cuts between them change no token."""
    tail = b""
    for piece in pieces:
        tail += piece
        tokens, consumed = tokeniser.encode_piece(tail, final=False)
        yield tokens
        tail = tail[consumed:]
    yield tokeniser.encode_piece(tail, final=True)[0]


def reading(paths: Sequence[Path], progress: Progress, what: str = "tokenising") -> Callable[[Path], OnRead]:
    """Make for each file the function that is told how far it is read; `progress` hears of all together, at times."""
    sizes = [path.stat().st_size for path in paths]
    before = {path: sum(sizes[:index]) for index, path in enumerate(paths)}
    total, last = sum(sizes), time.monotonic()

    def of(path: Path) -> OnRead:
        def on_read(done: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _TELL_EVERY_S or before[path] + done == total:
                last = now
                progress(what, before[path] + done, total)

        return on_read

    return of
