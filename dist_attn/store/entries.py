"""What the store keeps: the records, the keys they stand under, and what callers see of them.

    secret                        32 random bytes: what salts every id
    total, usage/TENANT           Usage of all, and of one caller
    snapshot/ID                   SnapshotRecord
    loose/TIME/ID                 a snapshot that nobody refers to; it may go after TIME
    session/ID                    SessionRecord
    owned/TENANT/ID               a session of this caller
    expiry/TIME/ID                when a session ends
    prefix/KEY                    PrefixRecord
    lru/TIME/KEY                  when a prefix was used last
    tenant-lru/TENANT/TIME/KEY    the same among those of one caller

TENANT is a salted hash of the caller's name. Values are JSON, so that a catalogue can be looked at.
"""

from typing import TypeVar

import msgspec
from msgspec import structs

from dist_attn.errors import StorageError
from dist_attn.store.owner import has_died

__all__ = [
    "Append",
    "Checkpoint",
    "PrefixRecord",
    "Session",
    "SessionRecord",
    "SnapshotInfo",
    "SnapshotRecord",
    "StoreLimits",
    "Usage",
    "Writer",
    "decode",
    "encode",
    "moment",
    "public_session",
]

T = TypeVar("T")


class StoreLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of everything. Units: `*_bytes` in bytes, `*_s` in seconds.

    `tenant_*` are the share of one caller. A snapshot that nobody refers to yet is kept for `hold_s`; bytes without a
    record, left by a writer that died, for `orphan_s`. What has expired is deleted once the clock has run evenly for
    `grace_s`. A writer of a session that says nothing for `writer_s` is taken for dead.
    """

    snapshot_bytes: int = 1 << 30
    store_bytes: int = 64 << 30
    tenant_bytes: int = 16 << 30
    tenant_sessions: int = 1024
    tenant_prefixes: int = 4096
    session_checkpoints: int = 64
    session_appends: int = 64
    session_ttl_s: float = 7 * 86_400.0
    longest_ttl_s: float = 90 * 86_400.0
    hold_s: float = 300.0
    orphan_s: float = 3600.0
    grace_s: float = 3600.0
    writer_s: float = 60.0
    writers: int = 8


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept for one caller, or for all; a snapshot counts once, however many refer to it."""

    bytes: int = 0
    snapshots: int = 0
    sessions: int = 0
    prefixes: int = 0

    def plus(self, *, size: int = 0, snapshots: int = 0, sessions: int = 0, prefixes: int = 0) -> "Usage":
        """With so many more."""
        return Usage(self.bytes + size, self.snapshots + snapshots, self.sessions + sessions, self.prefixes + prefixes)


class SnapshotInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored snapshot as its owner sees it: `digest` is the SHA-256 of its bytes, `id` is salted."""

    id: str
    size: int
    digest: str
    references: int
    made_at: float


class SnapshotRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A snapshot, where its bytes are, how many refer to it, and until when it stays although nobody does."""

    tenant: str
    blob: str
    size: int
    digest: str
    references: int
    held_until: float
    made_at: float

    def info(self, name: str) -> SnapshotInfo:
        """What its owner sees."""
        return SnapshotInfo(name, self.size, self.digest, self.references, self.made_at)


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position of a session, and the snapshot of the state there."""

    position: int
    snapshot: str
    made_at: float


class Append(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one append, named by its caller's key, has come to: it began at `start` and stands at `position`.

    `digest` is that of what is appended, "" where it is not known; `fed` that of the part up to `position`, so that who
    goes on can tell that it is the same; `result` is whatever the writer said at its end.
    """

    key: str
    start: int
    position: int
    digest: str = ""
    done: bool = False
    result: str = ""
    fed: str = ""


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who writes to a session now, and until when it is waited for; `owner` is its process, "" if nobody can know."""

    key: str
    token: str
    until: float
    owner: str = ""


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session; `checkpoints` by position, `appends` the newest last; `label` and `metadata` are its owner's own."""

    tenant: str
    made_at: float
    expires_at: float
    ttl_s: float
    position: int = 0
    parent: str = ""
    parent_position: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    appends: tuple[Append, ...] = ()
    writer: Writer | None = None
    label: str = ""
    metadata: dict[str, str] = {}


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session as its owner sees it; `parent` is the session it was forked from, "" for none.

    `busy_until` is until when its writer is waited for, 0 without one.
    """

    id: str
    position: int
    made_at: float
    expires_at: float
    parent: str
    parent_position: int
    checkpoints: tuple[Checkpoint, ...]
    busy_until: float = 0.0
    label: str = ""
    metadata: dict[str, str] = {}

    def checkpoint(self, position: int | None = None) -> Checkpoint | None:
        """The newest checkpoint at this position or before it; None where there is none."""
        limit = self.position if position is None else position
        return next((point for point in reversed(self.checkpoints) if point.position <= limit), None)


class PrefixRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state after a prefix, by the hash of its tokens."""

    tenant: str
    position: int
    snapshot: str
    used_at: float


def public_session(name: str, record: SessionRecord) -> Session:
    """What its owner sees of a session."""
    return Session(
        name,
        record.position,
        record.made_at,
        record.expires_at,
        record.parent,
        record.parent_position,
        record.checkpoints,
        0.0 if record.writer is None or has_died(record.writer.owner) else record.writer.until,
        record.label,
        record.metadata,
    )


def moment(time: float) -> str:
    """Seconds since 1970 as a key: keys stand in the order of time."""
    return f"{max(0.0, time):017.3f}"


def encode(value: object) -> bytes:
    """A record's bytes."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The record that these bytes are.

    Raises: StorageError when they are none.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"the catalogue holds what is no {kind.__name__} ({error}); it is damaged") from None


changed = structs.replace
"""The same record with other values in some fields."""
