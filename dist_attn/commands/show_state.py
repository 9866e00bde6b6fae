"""`dist-attn state`: what the file of a state says about itself, once all of it has been checked."""

import json
from pathlib import Path

from msgspec import structs

from dist_attn.commands.tables import Table, byte_size, print_tables
from dist_attn.errors import InputError, WireError
from dist_attn.wire.snapshot import PIECE_BYTES, Snapshot, SnapshotParser

__all__ = ["show_state"]


def show_state(file: Path, *, as_json: bool) -> None:
    """Print the manifest, the position and the arrays of a snapshot. Memory: its header.

    Raises: InputError for a file that cannot be read, or is no sound snapshot.
    """
    size = 0
    try:
        with file.open("rb") as source:
            size = file.stat().st_size
            parser = SnapshotParser(max_bytes=1 << 62)  # nothing is kept, so any size may pass
            while data := source.read(PIECE_BYTES):
                parser.feed(data)
            snapshot = parser.finish()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except WireError as error:
        raise InputError(f"{file}: {error}") from None
    if as_json:
        print(json.dumps(_as_json(snapshot, size)))
        return
    header = snapshot.header
    facts = [("position", str(header.position)), ("storage", header.storage), ("digest", snapshot.digest)]
    parts = (("model", header.manifest.model), ("computed", header.manifest.computed))
    tables = [Table(name, [(key, _text(value)) for key, value in structs.asdict(part).items()]) for name, part in parts]
    arrays = [
        (entry.name, entry.dtype, _shape(entry.shape), entry.encoding, byte_size(entry.stored_bytes))
        for entry in header.arrays
    ]
    tables.append(Table("arrays", arrays, ("name", "type", "shape", "stored as", "bytes")))
    print_tables(f"state in {file}", [Table("state", facts), *tables], [f"sound: {byte_size(size)}, every digest fits"])


def _as_json(snapshot: Snapshot, size: int) -> dict[str, object]:
    header = snapshot.header
    return {
        "position": header.position,
        "storage": header.storage,
        "digest": snapshot.digest,
        "bytes": size,
        "model": structs.asdict(header.manifest.model),
        "computed": structs.asdict(header.manifest.computed),
        "arrays": [
            {"name": entry.name, "type": entry.dtype, "shape": entry.shape, "stored_as": entry.encoding}
            for entry in header.arrays
        ],
    }


def _shape(lengths: list[int]) -> str:
    return " x ".join(map(str, lengths)) or "one number"


def _text(value: object) -> str:
    if isinstance(value, list):
        kinds = [str(one) for one in value]
        return f"{len(kinds)} layers: {', '.join(dict.fromkeys(kinds))}"
    return "none" if value is None else str(value)
