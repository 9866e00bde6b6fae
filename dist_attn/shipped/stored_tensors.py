"""The contents of a folder's safetensors files, by their headers alone: names, kinds of numbers, shapes and places."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import open_file, read_json_object

__all__ = ["BLOCKS", "StoredTensor", "check_safetensors", "read_stored_blocks", "read_stored_tensors"]

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
BLOCKS: Final = "blocks.safetensors"
"""Matrices once more as a GGUF file has them, each under the name of its blocks and its own."""
UNPICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")
MAX_HEADER_BYTES: Final = 1 << 25
MAX_TENSORS: Final = 1 << 18
"""The most tensors of a folder; a model of 60 layers with 384 experts in each has 70,000."""
MAX_DIMENSIONS: Final = 16
LENGTH_BYTES: Final = 8
NUMBER_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
"""Kinds of numbers that weights, and the tables that old folders keep beside them, come in; U8 for `BLOCKS`."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its file's name, its kind of number as safetensors names it, its shape, and its first byte there."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return prod(self.shape) * NUMBER_BYTES[self.dtype]


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Read the tensors of model.safetensors, or of all files that model.safetensors.index.json names.

    Raises: ModelFolderError for files that are missing, cut short, damaged or at odds with the index.
    """
    if os.path.lexists(folder / WEIGHTS):
        return _read_header(folder / WEIGHTS)
    if not os.path.lexists(folder / INDEX):
        found = [name for name in UNPICKLED if (folder / name).exists()]
        other = f"; it has {found[0]}, which is unpickled, and that may run code of the file" if found else ""
        raise ModelFolderError(
            f"{folder} has no {WEIGHTS} and no {INDEX}{other}: needed are weights as safetensors, fetch those"
        )
    return _read_shards(folder / INDEX)


def read_stored_blocks(folder: Path) -> dict[str, StoredTensor]:
    """Read the tensors of blocks.safetensors, bytes each; there are none without it.

    Raises: ModelFolderError for a file that is cut short or damaged.
    """
    return _read_header(folder / BLOCKS) if os.path.lexists(folder / BLOCKS) else {}


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    values = read_json_object(index)
    places, about = values.get("weight_map"), values.get("metadata")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelFolderError(f"{index} has no weight_map from names of tensors to names of files; fetch it again")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if file != Path(file).name:
            raise ModelFolderError(f"{index} names the file {file!r}; needed are names of files in the same folder")
        shard = _read_header(index.parent / file, f", which {index.name} names")
        twice = tensors.keys() & shard.keys()
        if twice:
            name = min(twice)
            raise ModelFolderError(f"{index.parent}: {name!r} is in {tensors[name].file} and in {file}; fetch it again")
        tensors |= shard
        _require_few(index.parent, len(tensors))
    for name, file in places.items():
        if name not in tensors or tensors[name].file != file:
            raise ModelFolderError(f"{index} says that {name!r} is in {file}, and that file does not hold it")
    total = about.get("total_size") if isinstance(about, dict) else None
    held = sum(tensor.nbytes for tensor in tensors.values())
    if isinstance(total, int | float) and total > held:
        raise ModelFolderError(
            f"{index} says that the tensors have {total:,.0f} bytes, and its files hold {held:,}: the folder is "
            "incomplete or mixed; fetch it again"
        )
    return tensors


def check_safetensors(path: Path) -> None:
    """Check a file before the safetensors library reads it, which it does without bounds.

    Raises: ModelFolderError for a file that cannot be read, is of another kind, or holds too many tensors.
    """
    _header(path)


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Read the entries of tensors in a file's header, the end of the header, and the bytes of the file."""
    with open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise ModelFolderError(
                    f"{path} has {size:,} bytes and its header would have {length:,}; needed are at most "
                    f"{MAX_HEADER_BYTES:,}: it is cut short, or no safetensors file; fetch it again"
                )
            text = file.read(length)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} has a header that is not JSON ({error}); fetch it again") from None
    header.pop("__metadata__", None)
    _require_few(path, len(header))
    return header, LENGTH_BYTES + length, size


def _require_few(path: Path, tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise ModelFolderError(f"{path} has {tensors:,} tensors or more; needed are at most {MAX_TENSORS:,}")


def _read_header(path: Path, which: str = "") -> dict[str, StoredTensor]:
    """Read the tensors of one file, whose length must be what its header says."""
    if path.is_symlink() and not path.exists():
        raise ModelFolderError(f"{path} is a link to {os.readlink(path)}, and nothing is there{which}; fetch it again")
    if not path.exists():
        raise ModelFolderError(f"{path} is not there{which}; needed is a safetensors file")
    header, start, size = _header(path)
    tensors, ends = {}, [0]
    for name, entry in header.items():
        tensors[name], end = _tensor(path, name, entry, start)
        ends.append(end - start)
        if end - tensors[name].begin != tensors[name].nbytes:
            shape = list(tensors[name].shape)
            raise ModelFolderError(
                f"{path}: {name!r} has {end - tensors[name].begin:,} bytes, and {shape} of {tensors[name].dtype} take "
                f"{tensors[name].nbytes:,}; fetch it again"
            )
    if max(ends) != size - start or sum(tensor.nbytes for tensor in tensors.values()) != max(ends):
        raise ModelFolderError(
            f"{path} has {size:,} bytes, and its header speaks of {start + max(ends):,}: it is cut "
            "short or damaged; fetch it again"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> tuple[StoredTensor, int]:
    """Read a tensor, with where its bytes end in the file; the header, which ends at `start`, counts from there."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or len(shape) > MAX_DIMENSIONS:
            raise ValueError
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ModelFolderError(f"{path}: its header does not say what {name!r} is; fetch it again") from None
    known = [kind for kind in NUMBER_BYTES if (kind == "U8") == (path.name == BLOCKS)]
    if dtype not in known:
        raise ModelFolderError(f"{path}: {name!r} holds {dtype!r}; needed is one of {', '.join(known)}")
    return StoredTensor(path.name, dtype, tuple(shape), start + begin), start + end
