"""A GGUF file: its header, within bounds before a library reads it, and the model folder made of it once; no torch."""

import fcntl
import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Final, final

from dist_attn.errors import EngineError, MissingExtraError, ModelFolderError, extra_hint
from dist_attn.log_lines import say
from dist_attn.shipped.folder_files import open_file
from dist_attn.shipped.stored_tensors import MAX_TENSORS

__all__ = ["REFUSED", "GgufHeader", "folder_of_gguf", "is_gguf", "read_gguf_header"]

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 1 << 26
"""The most bytes of keys and names of tensors; 262,144 tokens with 514,906 merges have some 16 MB."""
MAX_KEYS: Final = 1 << 12
MAX_ELEMENTS: Final = 1 << 21
"""The most elements of all arrays together: tokens, their scores and types, and merges."""
MAX_LISTED: Final = 1 << 12
"""The most elements of an array whose values are kept: those of layers, not those of tokens."""
MAX_TOKEN_BYTES: Final = 1 << 10  # reading merges off a vocabulary takes steps by the square of it
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 16
MAX_POSITIONS: Final = 1 << 31
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ANY_SIZE: Final = ("context_length", "original_context_length", "sliding_window")
"""Ends of keys whose numbers are no sizes of tensors."""
CONVERSION_S: Final = 3600.0
"""The seconds that a conversion may take; other ranks wait for it as long."""
REFUSED: Final = 2
"""The exit code of a conversion that refuses the file, in the last line that it prints."""


@dataclass(frozen=True)
class GgufHeader:
    """The keys with their values, of long arrays the lengths; and the shape of every tensor by its name."""

    keys: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(repr=False)

    @property
    def architecture(self) -> str:
        """The type of the model, as GGUF names it."""
        return str(self.keys["general.architecture"])

    @property
    def numbers(self) -> int:
        """The numbers in all tensors."""
        return sum(map(prod, self.shapes.values()))


def is_gguf(path: Path) -> bool:
    """Return whether a path names something that is there, is no folder, and ends in .gguf."""
    return path.suffix.lower() == ".gguf" and path.exists() and not path.is_dir()


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file, all of whose bytes it must account for.

    Memory: MAX_HEADER_BYTES, and the keys that are kept.

    Raises: ModelFolderError for a file that is of another kind, cut short, damaged or larger than any model's;
        MissingExtraError where `gguf`, which knows how numbers are stored, is not installed.
    """
    try:
        kinds = import_module("gguf.constants")  # by name: no image of the API, which reads no GGUF file, needs it
    except ImportError:
        raise MissingExtraError(
            f"{path} is read with the package gguf, which is not here: {extra_hint('hf')}"
        ) from None
    blocks = {int(kind): sizes for kind, sizes in kinds.GGML_QUANT_SIZES.items()}
    try:
        return _Reader(path).header(blocks)
    except (ValueError, struct.error) as error:
        raise ModelFolderError(f"{path} is no GGUF file that can be read: {error}; fetch it again") from None


def folder_of_gguf(path: Path) -> Path:
    """Find the model folder made of a GGUF file, in the user's cache by the file's SHA-256; make it the first time.

    Raises: as `read_gguf_header`; ModelFolderError for a model that is not supported; EngineError where the process
        that converts it fails.
    """
    read_gguf_header(path)
    with open_file(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME")
    place = (Path(cache) if cache else Path.home() / ".cache") / "dist-attn" / "gguf" / digest
    folder = place / (path.stem.strip(".") or "model")
    if not folder.is_dir():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of other ranks, which then find the folder
            if not folder.is_dir():
                _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    say(f"dist-attn: {path} becomes {folder}, this once", sys.stderr)
    command = [sys.executable, "-m", "dist_attn.conversion.gguf", str(path), str(folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CONVERSION_S
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"the process that converts {path} took longer than {CONVERSION_S:g} s") from None
    words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == REFUSED:
        raise ModelFolderError(words)
    if done.returncode:
        raise EngineError(f"the process that converts {path} failed: {words}")


@final
class _Reader:
    """The bytes of a header, taken one after another."""

    def __init__(self, path: Path) -> None:
        with open_file(path) as file:
            self._size = os.fstat(file.fileno()).st_size
            self._data = file.read(min(self._size, MAX_HEADER_BYTES))
        self._at = self._elements = 0

    def header(self, blocks: dict[int, tuple[int, int]]) -> GgufHeader:
        """Raises: ValueError or struct.error for anything that no model's file has."""
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = self._number("I"), self._number("Q"), self._number("Q")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; needed is {' or '.join(map(str, VERSIONS))}")
        _require(tensors <= MAX_TENSORS, f"it has {tensors:,} tensors; needed are at most {MAX_TENSORS:,}")
        _require(keys <= MAX_KEYS, f"it has {keys:,} keys; needed are at most {MAX_KEYS:,}")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            _require(key not in values, f"it has {key!r} twice")
            values[key] = self._value(self._number("I"))
        places = dict[str, tuple[tuple[int, ...], int, int]]()
        for _ in range(tensors):
            name, place = self._tensor(blocks)
            _require(name not in places, f"it has {name!r} twice")
            places[name] = place
        self._check_places(values.get("general.alignment", 32), places)
        header = GgufHeader(values, {name: shape for name, (shape, _, _) in places.items()})
        _check_sizes(header)
        return header

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError(f"its header goes beyond its end, or beyond {MAX_HEADER_BYTES:,} bytes")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _text(self, most: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        _require(length <= most, f"a text in it would have {length:,} bytes; needed are at most {most:,}")
        return self._take(length).decode()

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text()
        of, count = (self._number("I"), self._number("Q")) if kind == ARRAY else (kind, 0)
        _require(of in NUMBERS or (of == STRING and kind == ARRAY), f"a value in it is of the unknown kind {of}")
        self._elements += count
        _require(self._elements <= MAX_ELEMENTS, f"its arrays have more than {MAX_ELEMENTS:,} elements")
        if of == STRING:
            for _ in range(count):
                self._text(MAX_TOKEN_BYTES)
            return count
        data = self._take(count * struct.calcsize(f"<{NUMBERS[of]}"))
        return struct.unpack(f"<{count}{NUMBERS[of]}", data) if count <= MAX_LISTED else count

    def _tensor(self, blocks: dict[int, tuple[int, int]]) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Read the name of a tensor; its shape, the row first that numbers lie along, its first byte and its bytes."""
        name, dimensions = self._text(MAX_TOKEN_BYTES), self._number("I")
        _require(1 <= dimensions <= MAX_DIMENSIONS, f"{name!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        kind, begin = self._number("I"), self._number("Q")
        _require(kind in blocks, f"the numbers of {name!r} are of the unknown kind {kind}")
        numbers, nbytes = blocks[kind]
        _require(prod(shape) > 0, f"{name!r} has a dimension of 0")
        _require(shape[0] % numbers == 0, f"{name!r} has rows of {shape[0]} numbers; needed is a multiple of {numbers}")
        return name, (shape, begin, prod(shape) // numbers * nbytes)

    def _check_places(self, alignment: Any, places: dict[str, tuple[tuple[int, ...], int, int]]) -> None:
        fits = type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT and not alignment & (alignment - 1)
        _require(fits, f"its alignment is {alignment!r}; needed is a power of 2 up to {MAX_ALIGNMENT:,}")
        end = start = -(-self._at // alignment) * alignment
        for name, (_, begin, nbytes) in sorted(places.items(), key=lambda item: item[1][1]):
            at = start + begin
            _require(
                end <= at < end + alignment, f"{name!r} begins at byte {at:,}, and what is before it ends at {end:,}"
            )
            end = at + nbytes
        _require(end <= self._size < end + alignment, f"it has {self._size:,} bytes, and its header speaks of {end:,}")


def _check_sizes(header: GgufHeader) -> None:
    """Raises: ValueError for layers or widths that no tensor has, before anything is made in these sizes."""
    named = header.keys.get("general.architecture")
    _require(isinstance(named, str) and named != "", "it has no general.architecture")
    layers = {name.split(".")[1] for name in header.shapes if name.startswith("blk.")}
    largest = max(map(max, header.shapes.values()), default=0)
    for key, value in header.keys.items():
        if not key.startswith(f"{named}."):
            continue
        for number in value if isinstance(value, tuple) else (value,):
            whole = isinstance(number, int) and not isinstance(number, bool)
            most = MAX_POSITIONS if key.endswith(ANY_SIZE) else largest
            _require(not whole or 0 <= number <= most, f"{key} is {number}; its tensors allow at most {most:,}")
    count = header.keys.get(f"{named}.block_count")
    _require(count == len(layers), f"its block_count is {count!r}, and it has tensors of {len(layers)} layers")


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise ValueError(words)
