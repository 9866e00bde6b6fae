"""The entries of the store: the records, the keys they stand under, and what callers see of them.

    secret                        32 random bytes that salt every id
    total, usage/TENANT           Usage of all, and of one caller
    snapshot/ID                   SnapshotRecord
    loose/TIME/ID                 a snapshot without references; it may go after TIME
    session/ID                    SessionRecord
    owned/TENANT/ID               a session of this caller
    expiry/TIME/ID                the end of a session
    prefix/KEY                    PrefixRecord
    lru/TIME/KEY                  the last use of a prefix
    tenant-lru/TENANT/TIME/KEY    the last use among the prefixes of one caller

TENANT is a salted hash of the caller's name.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dist_attn.store.ledger import Record, Sums, has_died, moment, of_tenant


class StoreLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of the store. Units: `*_bytes` in bytes, `*_s` in seconds.

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


class Usage(Sums, frozen=True):
    """The amounts kept for one caller, or for all; a snapshot counts once, however many refer to it."""

    bytes: int = 0
    snapshots: int = 0
    sessions: int = 0
    prefixes: int = 0


class SnapshotInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stored snapshot as its owner sees it: `digest` is the SHA-256 of its bytes, `id` is salted."""

    id: str
    size: int
    digest: str
    references: int
    made_at: float


class SnapshotRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A snapshot: the place of its bytes, the number of its references, and until when it stays without any."""

    KIND: ClassVar[str] = "snapshot"
    tenant: str
    blob: str
    size: int
    digest: str
    references: int
    held_until: float
    made_at: float

    def index(self, name: str) -> tuple[str, ...]:
        """The key that finds a snapshot without references, by the time from which it may go."""
        return () if self.references else (f"loose/{moment(self.held_until)}/{name}",)

    def sums(self) -> Mapping[str, Sums]:
        """The bytes of this snapshot, in the sums of its caller and of all."""
        return of_tenant(self.tenant, Usage(bytes=self.size, snapshots=1))

    def info(self, name: str) -> SnapshotInfo:
        """The snapshot as its owner sees it."""
        return SnapshotInfo(name, self.size, self.digest, self.references, self.made_at)


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position of a session, and the snapshot of the state there."""

    position: int
    snapshot: str
    made_at: float


class Append(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of one append, named by its caller's key: it began at `start` and stands at `position`.

    `digest` is that of what is appended, "" where it is not known; `fed` that of the part up to `position`, by which a
    writer that goes on can tell that it has the same input; `result` is whatever the writer said at its end.
    """

    key: str
    start: int
    position: int
    digest: str = ""
    done: bool = False
    result: str = ""
    fed: str = ""


class Reached(msgspec.Struct, frozen=True):
    """The progress of a session: it stands at `position`, its state is in that snapshot, and all up to there was fed.

    `fed` is a digest of what has been fed. With `done` the append has ended, and `result` is what a caller who sends it
    again is told; `digest` is that of the whole, where it was not known at the beginning.
    """

    position: int
    snapshot: str
    done: bool = False
    result: str = ""
    fed: str = ""
    digest: str = ""


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The present writer of a session, waited for until `until`; `owner` is its process, "" if nobody can know."""

    key: str
    token: str
    until: float
    owner: str = ""


class SessionRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A session; `checkpoints` by position, `appends` the newest last; `label` and `metadata` are its owner's own."""

    KIND: ClassVar[str] = "session"
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
    metadata: dict[str, str] = msgspec.field(default_factory=dict)

    def index(self, name: str) -> tuple[str, ...]:
        """The keys that find the session: by the time of its end, and among its caller's."""
        return f"expiry/{moment(self.expires_at)}/{name}", f"owned/{self.tenant}/{name}"

    def sums(self) -> Mapping[str, Sums]:
        """One session, in the sums of its caller and of all."""
        return of_tenant(self.tenant, Usage(sessions=1))

    def shown(self, name: str) -> "Session":
        """The session as its owner sees it."""
        busy_until = 0.0 if self.writer is None or has_died(self.writer.owner) else self.writer.until
        return Session(
            name,
            self.position,
            self.made_at,
            self.expires_at,
            self.parent,
            self.parent_position,
            self.checkpoints,
            busy_until,
            self.label,
            self.metadata,
        )


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


class PrefixRecord(Record, frozen=True, forbid_unknown_fields=True):
    """The state after a prefix, by the hash of its tokens."""

    KIND: ClassVar[str] = "prefix"
    tenant: str
    position: int
    snapshot: str
    used_at: float

    def index(self, name: str) -> tuple[str, ...]:
        """The keys that find the prefix by the time of its last use: among all, and among its caller's."""
        at = moment(self.used_at)
        return f"lru/{at}/{name}", f"tenant-lru/{self.tenant}/{at}/{name}"

    def sums(self) -> Mapping[str, Sums]:
        """One prefix, in the sums of its caller and of all."""
        return of_tenant(self.tenant, Usage(prefixes=1))
