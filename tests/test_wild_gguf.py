"""GGUF files that are damaged, or say more than they hold: refused in words, in steps and memory by their bytes."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_attn.errors import ModelFolderError
from dist_attn.shipped import gguf_file, resolve_model_folder
from dist_attn.shipped.gguf_file import MAX_ELEMENTS, MAX_KEYS, read_gguf_header
from dist_attn.shipped.stored_tensors import MAX_TENSORS

U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 60
SPARE_BYTES = 1 << 20  # what Python itself and the library that knows the kinds of numbers take


def _text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(of: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", of, count) + data


def _tensor(name: str = "blk.0.a", shape: Sequence[int] = (8, 4), kind: int = 0, begin: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + dimensions + struct.pack("<IQ", kind, begin)


ARCHITECTURE = _key("general.architecture", STRING, _text("llama"))
KEYS = [ARCHITECTURE, _key("llama.block_count", U32, struct.pack("<I", 1))]


def _file(keys: Sequence[bytes] = KEYS, tensors: Sequence[bytes] = (_tensor(),), **other: Any) -> bytes:
    """A file of these parts; `other` says what its beginning says instead, and what follows the header."""
    counts = other.get("tensor_count", len(tensors)), other.get("key_count", len(keys))
    header = other.get("magic", b"GGUF") + struct.pack("<IQQ", other.get("version", 3), *counts)
    header += b"".join((*keys, *tensors))
    header += bytes(-len(header) % other.get("alignment", 32))
    return header + bytes(other.get("data", 128))


def _more(*keys: bytes) -> bytes:
    return _file([*KEYS, *keys])


HOSTILE: dict[str, tuple[bytes, str]] = {
    "another kind of file": (_file(magic=b"GGML"), "does not begin with GGUF"),
    "nothing": (b"", "beyond its end"),
    "a version of old": (_file(version=1), "version is 1"),
    "more tensors than any model": (_file(tensor_count=HUGE), f"{HUGE:,} tensors; needed are at most {MAX_TENSORS:,}"),
    "more tensors than it has": (_file(tensor_count=9, data=0), "beyond its end"),
    "more keys than any model": (_file(key_count=HUGE), f"{HUGE:,} keys; needed are at most {MAX_KEYS:,}"),
    "a text without an end": (_more(_key("a", STRING, _text("b", HUGE))), "a text in it would have"),
    "a text of no characters": (_more(_key("a", STRING, _text(b"\xff"))), "codec can't decode"),
    "an array without an end": (_more(_key("a", ARRAY, _array(0, HUGE))), f"more than {MAX_ELEMENTS:,} elements"),
    "an array of arrays": (_more(_key("a", ARRAY, _array(ARRAY, 1, _array(0, 1)))), "unknown kind 9"),
    "a long token": (_more(_key("a", ARRAY, _array(STRING, 1, _text("b" * 2000)))), "at most 1,024"),
    "a value of an unknown kind": (_more(_key("a", 99, b"")), "unknown kind 99"),
    "a key twice": (_more(ARCHITECTURE), "twice"),
    "no architecture": (_file(KEYS[1:]), "no general.architecture"),
    "an alignment of three": (_more(_key("general.alignment", U32, struct.pack("<I", 3))), "power of 2"),
    "more layers than tensors": (
        _file([ARCHITECTURE, _key("llama.block_count", U32, struct.pack("<I", 1 << 31))]), "its tensors allow at most"
    ),
    "a width that no tensor has": (
        _more(_key("llama.rope.dimension_count", 10, struct.pack("<Q", HUGE))), "its tensors allow at most 8"
    ),
    "dimensions by the thousand": (_file(tensors=[_tensor(shape=[1] * 5000)]), "has 5000 dimensions"),
    "a tensor of more than all memory": (_file(tensors=[_tensor(shape=[1 << 62, 1 << 62])]), "its header speaks of"),
    "a tensor of nothing": (_file(tensors=[_tensor(shape=[0, 4])]), "dimension of 0"),
    "numbers of an unknown kind": (_file(tensors=[_tensor(kind=999)]), "unknown kind 999"),
    "rows that are no blocks": (_file(tensors=[_tensor(kind=8)]), "multiple of 32"),
    "a tensor behind the end": (_file(tensors=[_tensor(begin=HUGE)]), "begins at byte"),
    "tensors in one place": (_file(tensors=[_tensor(), _tensor("blk.0.b")]), "what is before it ends at"),
    "a tensor twice": (_file(tensors=[_tensor(), _tensor(begin=128)], data=256), "twice"),
    "bytes that nothing names": (_file(data=1 << 20), "its header speaks of"),
    "a file that was cut": (_file(data=100), "its header speaks of"),
}  # fmt: skip


def test_the_form_that_hostile_files_depart_from_is_read(tmp_path: Path) -> None:
    """Each of the files below is wrong in one thing alone."""
    (tmp_path / "a.gguf").write_bytes(_file())
    assert read_gguf_header(tmp_path / "a.gguf").shapes == {"blk.0.a": (8, 4)}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The file and the fault are named; memory is some times its bytes, and it has no more parts than bytes."""
    data, words = HOSTILE[what]
    file, steps = tmp_path / "some.gguf", list[int]()
    file.write_bytes(data)
    take = gguf_file._Reader._take

    def counted(self: Any, count: int) -> bytes:
        steps.append(count)
        return take(self, count)

    monkeypatch.setattr(gguf_file._Reader, "_take", counted)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFolderError, match=words) as refusal:
            resolve_model_folder(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "some.gguf" in str(refusal.value) and len(str(refusal.value)) < 400
    assert len(steps) <= len(data) + 1
    assert peak <= 4 * len(data) + SPARE_BYTES


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    """Of a terabyte of zeros behind a true header no more is read than a header may have, and it is not hashed."""
    file = tmp_path / "some.gguf"
    file.write_bytes(_file())
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFolderError, match="its header speaks of"):
            resolve_model_folder(file)
        assert tracemalloc.get_traced_memory()[1] <= 2 * gguf_file.MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()
