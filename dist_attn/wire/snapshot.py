"""The file of a state: a header that is checked before anything is allocated, then raw little-endian arrays.

    8 bytes    magic, the format's version in its last byte
    4 bytes    bytes of the header, little-endian
    32 bytes   SHA-256 of the header: with the digests in it, that of the whole
    header     msgpack of SnapshotHeader, in the one form that this library writes
    arrays     one after the other, without gaps, in the order and sizes of the header

Nothing is unpickled. Equal states have equal bytes.
"""

import hashlib
import math
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal, final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dist_attn.errors import WireError
from dist_attn.wire.compact import Encoding, decode_compact, encode_compact, encoded_bytes
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.specs import LONGEST_TEXT

MAGIC = b"DASTATE\x01"
PRELUDE = struct.Struct("<8sI32s")
MAX_HEADER_BYTES = 64 << 10  # the prelude included
DEFAULT_MAX_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
MAX_NUMBERS = 1 << 40  # of one array
LEAST_COMPACT = 256
"""The numbers of an array below which it is stored exactly, whatever the storage."""

Storage = Literal["exact", "bf16", "int8"]
NumberType = Literal["bool", "i32", "i64", "bf16", "f16", "f32", "f64", "c64", "c128"]

NUMPY_TYPES: dict[NumberType, str] = {
    "bool": "|b1",
    "i32": "<i4",
    "i64": "<i8",
    "bf16": "<u2",  # numpy has none: the bits
    "f16": "<f2",
    "f32": "<f4",
    "f64": "<f8",
    "c64": "<c8",
    "c128": "<c16",
}
_NAMES: dict[str, NumberType] = {np.dtype(code).str: name for name, code in NUMPY_TYPES.items()}

Name = Annotated[str, Meta(pattern=r"^(logits|layers\.(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]?))\Z")]
Dimension = Annotated[int, Meta(ge=0, le=1 << 40)]


class ArrayEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One array: `layers.L.I` is tensor I of layer L's state, without the batch; `logits` those after the last token.

    `sha256` is that of the stored bytes.
    """

    name: Name
    dtype: NumberType
    shape: Annotated[list[Dimension], Meta(max_length=8)]
    encoding: Encoding
    sha256: Annotated[bytes, Meta(min_length=32, max_length=32)]

    @property
    def numbers(self) -> int:
        """The count of real numbers that are stored."""
        return math.prod(self.shape) * (2 if self.dtype in ("c64", "c128") else 1)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the array in the file."""
        size = np.dtype(NUMPY_TYPES[self.dtype]).itemsize // (2 if self.dtype in ("c64", "c128") else 1)
        return encoded_bytes(self.encoding, self.numbers, size)


class SnapshotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of a state, its position and its arrays. A state is valid at `position` and nowhere else."""

    manifest: Manifest
    position: Annotated[int, Meta(ge=0, le=1 << 53)]
    storage: Storage
    arrays: Annotated[list[ArrayEntry], Meta(max_length=4096)]

    @property
    def array_bytes(self) -> int:
        """The bytes of all arrays in the file."""
        return sum(entry.stored_bytes for entry in self.arrays)

    @property
    def state_bytes(self) -> int:
        """The bytes of all arrays as a model holds them: more than in the file, where storage is compact."""
        return sum(math.prod(entry.shape) * np.dtype(NUMPY_TYPES[entry.dtype]).itemsize for entry in self.arrays)


@dataclass(frozen=True)
class Snapshot:
    """A header and its arrays by name; of the type that the state has, whatever the storage. `digest` is in hex."""

    header: SnapshotHeader
    arrays: dict[str, NDArray[Any]]
    digest: str


@final
class SnapshotFile:
    """A snapshot ready to be written: the bytes before the arrays, and the arrays as they lie in memory."""

    def __init__(self, header: SnapshotHeader, payloads: Sequence[memoryview]) -> None:
        encoded = _encoder.encode(header)
        if PRELUDE.size + len(encoded) > MAX_HEADER_BYTES:
            raise WireError(
                f"a header of {len(encoded)} bytes for {len(header.arrays)} arrays is over the limit of "
                f"{MAX_HEADER_BYTES - PRELUDE.size}; the model has too many layers for this format"
            )
        digest = hashlib.sha256(encoded)
        self.header = header
        self.digest = digest.hexdigest()
        self._head = PRELUDE.pack(MAGIC, len(encoded), digest.digest()) + encoded
        self._payloads = payloads

    @property
    def nbytes(self) -> int:
        """The bytes of the whole file."""
        return len(self._head) + self.header.array_bytes

    def pieces(self, size: int = PIECE_BYTES) -> Iterator[bytes]:
        """Iterate over the file in order, at most `size` bytes at a time."""
        yield self._head
        for payload in self._payloads:
            for at in range(0, len(payload), size):
                yield bytes(payload[at : at + size])


def pack_snapshot(
    manifest: Manifest, position: int, arrays: Iterable[tuple[str, NDArray[Any]]], *, storage: Storage = "exact"
) -> SnapshotFile:
    """Pack these arrays as a snapshot; exactly stored ones that lie in memory in order are not copied.

    bfloat16 arrays are given as their bits, uint16. `storage` bf16 or int8 rounds float32 and complex64 state arrays
    of LEAST_COMPACT numbers or more: such a state is not the one that was given, and never counts as exact.

    Raises: WireError for names, types or sizes that the format does not have, and numbers that cannot be rounded.
    """
    entries, payloads = [], []
    for name, array in arrays:
        dtype = _NAMES.get(array.dtype.newbyteorder("<").str)
        if dtype is None:
            raise WireError(f"array {name} has type {array.dtype}; a snapshot holds {', '.join(NUMPY_TYPES)}")
        plain = np.ascontiguousarray(array, dtype=NUMPY_TYPES[dtype]).reshape(-1)
        encoding: Encoding = "raw"
        if storage != "exact" and name != "logits" and dtype in ("f32", "c64") and plain.size >= LEAST_COMPACT:
            encoding, plain = storage, encode_compact(plain.view(np.float32), storage)
        payload = plain.view(np.uint8).data if plain.size else memoryview(b"")
        payloads.append(payload)
        entries.append(ArrayEntry(name, dtype, list(array.shape), encoding, hashlib.sha256(payload).digest()))
    header = SnapshotHeader(manifest, position, storage, entries)
    try:
        checked = _decoder.decode(_encoder.encode(header))
    except (msgspec.MsgspecError, OverflowError) as error:
        raise WireError(f"this state cannot be stored: {error}") from None
    _check_header(checked)
    return SnapshotFile(header, payloads)


def check_position(position: int) -> None:
    """Raises: WireError for a state of more tokens than a text may have."""
    if position > LONGEST_TEXT:
        raise WireError(
            f"the state stands at token {position}, and a text has at most {LONGEST_TEXT} tokens; read the text again "
            "into a new session"
        )


def largest_snapshot(state_bytes: int, vocab_size: int) -> int:
    """The most bytes of a snapshot with a state of `state_bytes` bytes, and the logits after its last token."""
    return MAX_HEADER_BYTES + state_bytes + 4 * vocab_size


def read_snapshot(file: BinaryIO, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Snapshot:
    """Read the snapshot that a binary file holds from its present place to its end.

    Raises: WireError for anything that `pack_snapshot` does not write, and for arrays of more than `max_bytes`.
    """
    parser = SnapshotParser(max_bytes=max_bytes, keep=True)
    while data := file.read(PIECE_BYTES):
        parser.feed(data)
    return parser.finish()


def header_of(beginning: bytes) -> SnapshotHeader:
    """Read the header of a snapshot, of which the first MAX_HEADER_BYTES or more are given.

    Raises: WireError.
    """
    parser = SnapshotParser(max_bytes=sys.maxsize)
    parser.feed(beginning)
    if parser.header is None:
        raise WireError("the snapshot ends in its header")
    return parser.header


@final
class SnapshotParser:
    """A parser that reads a snapshot as its bytes come; anything wrong is a WireError as soon as it can be seen.

    Memory: a header (64 KB at most) and, with `keep`, the arrays, which grow with what comes and not with what a header
    claims. Without `keep` bytes are only checked, as for an upload that goes to a store.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_MAX_BYTES, keep: bool = False) -> None:
        self._max_bytes = max_bytes
        self._keep = keep
        self._head = bytearray()
        self._head_bytes = PRELUDE.size
        self._digest = ""
        self._entry = 0
        self._left = 0  # bytes of the current array that have not come
        self._hash = hashlib.sha256()
        self._payload = bytearray()
        self._arrays: dict[str, NDArray[Any]] = {}
        self.header: SnapshotHeader | None = None
        """The header, once its bytes have come."""

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes.

        Raises: WireError when they cannot be those of a snapshot.
        """
        rest = memoryview(data)
        while self.header is None and len(rest):
            taken = rest[: self._head_bytes - len(self._head)]
            self._head += taken
            rest = rest[len(taken) :]
            if len(self._head) == self._head_bytes:
                self._head_is_whole()
        while len(rest):
            if self.header is None or self._entry == len(self.header.arrays):
                raise WireError(f"{len(rest)} bytes or more follow the end of the snapshot")
            taken = rest[: self._left]
            rest = rest[len(taken) :]
            self._hash.update(taken)
            if self._keep:
                self._payload += taken
            self._left -= len(taken)
            self._end_arrays()

    def finish(self) -> Snapshot:
        """Return the snapshot, once all bytes have been fed; without its arrays unless they were kept.

        Raises: WireError when bytes are missing.
        """
        if self.header is None:
            raise WireError(f"a snapshot's header has {self._head_bytes} bytes or more; only {len(self._head)} came")
        if self._entry < len(self.header.arrays):
            name = self.header.arrays[self._entry].name
            raise WireError(f"the snapshot ends inside array {name}: {self._left} of its bytes are missing")
        return Snapshot(self.header, self._arrays, self._digest)

    def _head_is_whole(self) -> None:
        """Check the prelude when it has come, and read the header when that has."""
        magic, length, digest = PRELUDE.unpack_from(self._head)
        if len(self._head) == PRELUDE.size:
            if magic[:-1] != MAGIC[:-1]:
                raise WireError("this is not a snapshot of a state: its first bytes are others")
            if magic != MAGIC:
                raise WireError(f"a snapshot of format {magic[-1]} was given; this library reads format {MAGIC[-1]}")
            if not 0 < length <= MAX_HEADER_BYTES - PRELUDE.size:
                limit = MAX_HEADER_BYTES - PRELUDE.size
                raise WireError(f"a snapshot's header of {length} bytes was announced; it has 1 to {limit}")
            self._head_bytes += length
            return
        encoded = bytes(self._head[PRELUDE.size :])
        if hashlib.sha256(encoded).digest() != digest:
            raise WireError("the snapshot's header is damaged: its digest is another than the file says")
        header = _decode_header(encoded)
        if max(header.array_bytes, header.state_bytes) > self._max_bytes:
            raise WireError(
                f"the snapshot's arrays take {header.array_bytes} bytes in the file, {header.state_bytes} in memory, "
                f"over the limit of {self._max_bytes}"
            )
        self.header, self._digest = header, digest.hex()
        self._begin_array()
        self._end_arrays()

    def _begin_array(self) -> None:
        assert self.header is not None
        self._hash, self._payload = hashlib.sha256(), bytearray()
        if self._entry < len(self.header.arrays):
            self._left = self.header.arrays[self._entry].stored_bytes

    def _end_arrays(self) -> None:
        """Close every array whose bytes are all there; empty ones have none."""
        assert self.header is not None
        while not self._left and self._entry < len(self.header.arrays):
            entry = self.header.arrays[self._entry]
            if self._hash.digest() != entry.sha256:
                raise WireError(f"array {entry.name} is damaged: its digest is another than the header says")
            if self._keep:
                self._arrays[entry.name] = _decode_array(entry, memoryview(self._payload))
            self._entry += 1
            self._begin_array()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SnapshotHeader)


def _decode_header(encoded: bytes) -> SnapshotHeader:
    try:
        header = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the snapshot's header is unreadable: {error}") from None
    if _encoder.encode(header) != encoded:
        raise WireError("the snapshot's header is not in the form that this library writes")
    _check_header(header)
    return header


def _check_header(header: SnapshotHeader) -> None:
    """Check the rules of a header that the types of its fields do not express.

    Raises: WireError.
    """
    check_position(header.position)
    model = header.manifest.model
    layer_at, due = -1, 0  # the layer at hand, and its next tensor
    for number, entry in enumerate(header.arrays):
        if math.prod(max(length, 1) for length in entry.shape) > MAX_NUMBERS:
            raise WireError(f"array {entry.name} of shape {entry.shape} is larger than any this format holds")
        if header.storage == "exact" and entry.encoding != "raw":
            raise WireError(f"array {entry.name} is stored as {entry.encoding} in a snapshot that calls itself exact")
        if entry.encoding not in ("raw", header.storage):
            raise WireError(f"array {entry.name} is stored as {entry.encoding} in a snapshot of {header.storage}")
        if entry.encoding != "raw" and (entry.dtype not in ("f32", "c64") or entry.name == "logits"):
            raise WireError(f"array {entry.name} of type {entry.dtype} is stored as {entry.encoding}; it must be raw")
        if entry.name == "logits":
            if number or entry.dtype != "f32" or entry.shape != [model.vocab_size]:
                raise WireError(
                    f"logits are array {number}, {entry.dtype} {entry.shape}; they must come first and be "
                    f"f32 [{model.vocab_size}]"
                )
            continue
        layer, index = (int(digits) for digits in re.findall(r"[0-9]+", entry.name))
        due = due if layer == layer_at else 0
        if layer < layer_at or layer >= len(model.mixers) or index != due:
            raise WireError(
                f"array {entry.name} stands at place {number}; arrays go by layer, below {len(model.mixers)}, and in "
                "each from 0 without a gap"
            )
        layer_at, due = layer, index + 1


def _decode_array(entry: ArrayEntry, payload: memoryview) -> NDArray[Any]:
    if entry.encoding == "raw":
        if entry.dtype == "bool" and (np.frombuffer(payload, dtype=np.uint8) > 1).any():
            raise WireError(f"array {entry.name} of bool holds bytes that are neither 0 nor 1")
        flat: NDArray[Any] = np.frombuffer(payload, dtype=NUMPY_TYPES[entry.dtype])
    else:
        flat = decode_compact(payload, entry.encoding, entry.numbers).view(NUMPY_TYPES[entry.dtype])
    return flat.reshape(entry.shape)
