"""`dist-attn state`: the contents of a state's file, and a new catalogue for a folder that lost its own."""

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path

import msgspec
from msgspec import structs

from dist_attn.commands.tables import Table, byte_size, print_tables
from dist_attn.errors import CatalogueDamagedError, InputError, WireError
from dist_attn.store import StateStore, StoreLimits
from dist_attn.store.disk import CATALOGUE, RESERVE, SNAPSHOTS, DiskBlobs, DiskRecords, has_records
from dist_attn.store.files import WRITING
from dist_attn.store.private import make_private
from dist_attn.wire.snapshot import PIECE_BYTES, Snapshot, SnapshotParser


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


UNFINISHED = "catalogue.repaired.sqlite"
WITHOUT_BOUND = 1 << 62
NOT_RESTORED = (
    "not restored, as only the catalogue knew it: whose states these were, names and metadata of sessions, which "
    "states were of one session, idempotency keys, and the index of prefixes"
)


class RestoredSession(msgspec.Struct, frozen=True):
    """A state that has a session now."""

    session: str
    position: int
    bytes: int
    file: str


class Repaired(msgspec.Struct, frozen=True):
    """The result of a repair: new sessions, files that hold no sound state with the reason, and where those lie now."""

    sessions: list[RestoredSession] = []
    refused: dict[str, str] = {}
    aside: str = ""


def repair_states(folder: Path, *, caller: str, as_json: bool) -> None:
    """Give every sound state of a folder a session of this caller.

    Nothing is deleted: what cannot be used is moved to a folder `aside-TIME` in it. `caller` is the SHA-256 in hex
    of an API key, "" for a service without keys.

    Raises: InputError for a folder that holds no states or whose catalogue is sound; StorageError for a catalogue of
        which neither can be told, such as one that another process has locked, and where the new one cannot be written.
    """
    if not (folder / SNAPSHOTS).is_dir():
        raise InputError(f"{folder} holds no states: it has no folder {SNAPSHOTS}; name the one of store.address")
    catalogue = folder / CATALOGUE
    if has_records(catalogue) and asyncio.run(_is_sound(catalogue)):
        raise InputError(f"the catalogue of {folder} is sound; there is nothing to repair, and nothing was changed")
    aside = folder / time.strftime("aside-%Y%m%dT%H%M%S")
    for left in folder.glob(f"{UNFINISHED}*"):
        left.unlink()
    done = asyncio.run(_rebuild(folder, aside, caller))
    for path in sorted(folder.glob(f"{CATALOGUE}*")):
        if not path.name.endswith(RESERVE):
            _move(path, aside / path.name)
    (folder / f"{UNFINISHED}{RESERVE}").unlink(missing_ok=True)
    os.replace(folder / UNFINISHED, catalogue)
    _tell(folder, msgspec.structs.replace(done, aside=str(aside) if aside.exists() else ""), as_json=as_json)


async def _is_sound(catalogue: Path) -> bool:
    try:
        records = await DiskRecords.open(catalogue)
        try:
            return await records.transact(lambda transaction: transaction.get("secret")) is not None
        finally:
            await records.close()
    except CatalogueDamagedError:
        return False


async def _rebuild(folder: Path, aside: Path, caller: str) -> Repaired:
    """Make sessions in a catalogue beside the lost one, so that a repair that is cut off can be done again."""
    done = Repaired()
    limits = StoreLimits(tenant_bytes=WITHOUT_BOUND, store_bytes=WITHOUT_BOUND, tenant_sessions=WITHOUT_BOUND)
    seen: set[str] = set()
    records, blobs = await DiskRecords.open(folder / UNFINISHED), DiskBlobs(folder / SNAPSHOTS)
    async with await StateStore.over(records, blobs, limits) as store:
        for path in sorted((folder / SNAPSHOTS).glob("??/*")):
            try:
                position, size, digest = _checked(path)
                if digest in seen:
                    raise WireError("its bytes are those of another file")
            except (OSError, WireError) as error:
                _move(path, aside / SNAPSHOTS / path.parent.name / path.name)
                done.refused[path.name] = str(error)
                continue
            seen.add(digest)
            name = path.name.removesuffix(WRITING)  # a sound state that only its last name lacked
            path.rename(path.with_name(name))
            info = await store.snapshots.adopt(caller, name, digest, size)
            session = await store.sessions.create(caller, label=f"restored {name}")
            await store.sessions.replace(caller, session.id, position, info.id, instead_of="")
            done.sessions.append(RestoredSession(session.id, position, size, name))
    return done


def _checked(path: Path) -> tuple[int, int, str]:
    """Read the position, bytes and SHA-256 of a file that holds a sound state.

    Raises: OSError, WireError.
    """
    parser, digest, size = SnapshotParser(max_bytes=WITHOUT_BOUND), hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            parser.feed(data)
            digest.update(data)
            size += len(data)
    header = parser.finish().header
    if not header.position:
        raise WireError("it has seen no token")
    return header.position, size, digest.hexdigest()


def _move(path: Path, to: Path) -> None:
    make_private(to.parent)
    os.replace(path, to)


def _tell(folder: Path, done: Repaired, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(done)))
        return
    tables = []
    if done.sessions:
        rows = [(one.session, str(one.position), byte_size(one.bytes), one.file) for one in done.sessions]
        tables.append(Table("sessions", rows, ("session", "position", "bytes", "file")))
    if done.refused:
        tables.append(Table("no sound states", list(done.refused.items()), ("file", "why")))
    notes = [NOT_RESTORED] if done.sessions else []
    if done.aside:
        notes.append(f"what could not be used lies in {done.aside}; nothing was deleted")
    print_tables(f"states in {folder}", tables, notes)
