"""Sessions: their positions, checkpoints and forks, and appends that are fed once however often they are sent."""

import secrets
from collections.abc import Mapping
from typing import final

from dist_attn.errors import BusyError, ConflictError, InputError, PositionError, QuotaError, UnknownStateError
from dist_attn.store.entries import (
    Append,
    Checkpoint,
    Reached,
    Session,
    SessionRecord,
    SnapshotInfo,
    Writer,
)
from dist_attn.store.ledger import changed, has_died, this_process
from dist_attn.store.state_ledger import Place, StateLedger

LONGEST_KEY = 256
LEAST_TTL_S = 1.0


@final
class Sessions:
    """The sessions of a place. Only what stands here counts: a writer that dies has fed nothing more."""

    def __init__(self, place: Place) -> None:
        self._place = place

    async def create(
        self, tenant: str, *, ttl_s: float | None = None, label: str = "", metadata: Mapping[str, str] | None = None
    ) -> Session:
        """Begin a session at position 0, which ends `ttl_s` after it was last written to.

        `label` and `metadata` are kept as they are given; the caller bounds their sizes.

        Raises: QuotaError when the caller has as many as may be.
        """
        tag = self._place.tenant(tenant)

        async def enter(ledger: StateLedger) -> Session:
            record = SessionRecord(tag, ledger.now, 0.0, _ttl(ledger, ttl_s))
            return await _begin(ledger, changed(record, label=label, metadata=dict(metadata or {})))

        return await self._place.change(enter)

    async def get(self, tenant: str, name: str) -> Session:
        """The session of this name.

        Raises: UnknownStateError when it is not there, has expired, or is not this caller's.
        """
        tag = self._place.tenant(tenant)
        return (await self._place.change(lambda ledger: ledger.owned_session(tag, name))).shown(name)

    async def listed(self, tenant: str, *, after: str = "", limit: int = 100) -> list[Session]:
        """List up to `limit` sessions of a caller, in the order of their ids, after `after`."""
        tag = self._place.tenant(tenant)
        prefix = f"owned/{tag}/"

        async def read(ledger: StateLedger) -> list[Session]:
            shown: list[Session] = []
            last = f"{prefix}{after}" if after else ""
            while len(shown) < limit and (rows := await ledger.transaction.scan(prefix, min(limit, 1000), last)):
                names = [key.removeprefix(prefix) for key, _ in rows]
                for name, record in zip(names, await ledger.find_all(SessionRecord, names), strict=True):
                    if record is not None and record.expires_at > ledger.now:
                        shown.append(record.shown(name))
                last = rows[-1][0]
            return shown[:limit]

        return await self._place.change(read)

    async def delete(self, tenant: str, name: str) -> None:
        """End a session and let go of its snapshots; forks of it live on.

        Raises: UnknownStateError.
        """
        tag = self._place.tenant(tenant)

        async def end(ledger: StateLedger) -> None:
            await ledger.drop_session(name, await ledger.owned_session(tag, name))

        await self._place.change(end)

    async def checkpoints(self, tenant: str, name: str) -> list[tuple[Checkpoint, SnapshotInfo]]:
        """List the checkpoints of a session by position, each with what is known of its snapshot.

        Raises: UnknownStateError.
        """
        tag = self._place.tenant(tenant)

        async def read(ledger: StateLedger) -> list[tuple[Checkpoint, SnapshotInfo]]:
            record = await ledger.owned_session(tag, name)
            return [
                (point, (await ledger.owned_snapshot(tag, point.snapshot)).info(point.snapshot))
                for point in record.checkpoints
            ]

        return await self._place.change(read)

    async def replace(self, tenant: str, name: str, position: int, snapshot: str, *, instead_of: str) -> Session:
        """Let the session stand at `position` of another text, with that snapshot as its only checkpoint.

        It forgets the keys of its appends, for what they appended is not in that text. `instead_of` is the snapshot
        that the caller thinks it stands at, "" for a session without any.

        Raises: UnknownStateError for a session or snapshot that is not there; BusyError while it is being written to;
            ConflictError when it stands at another snapshot.
        """
        tag = self._place.tenant(tenant)

        async def put(ledger: StateLedger) -> Session:
            before = await ledger.owned_session(tag, name)
            _require_no_writer(name, before, ledger)
            if instead_of != (before.checkpoints[-1].snapshot if before.checkpoints else ""):
                raise ConflictError(f"the state of session {name} is another one by now; look at it again")
            await ledger.refer(tag, snapshot)
            for point in before.checkpoints:
                await ledger.release(point.snapshot)
            point = Checkpoint(position, snapshot, ledger.now)
            record = changed(before, position=position, checkpoints=(point,), appends=(), writer=None)
            return await _save(ledger, name, record, before)

        return await self._place.change(put)

    async def fork(
        self,
        tenant: str,
        name: str,
        *,
        position: int | None = None,
        ttl_s: float | None = None,
        label: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Session:
        """Begin a session that goes on from a checkpoint of this one; nothing is copied. Cost: O(1), for any length.

        Without `position` it is where the session stands, which must be a checkpoint. The two never touch each other;
        without `ttl_s` the new one lives as long as this one.

        Raises: UnknownStateError for a session or position that is not there; QuotaError.
        """
        tag = self._place.tenant(tenant)

        async def split(ledger: StateLedger) -> Session:
            parent = await ledger.owned_session(tag, name)
            at = parent.position if position is None else position
            points = tuple(point for point in parent.checkpoints if point.position == at)
            if not points and at:
                where = ", ".join(str(point.position) for point in parent.checkpoints) or "none"
                raise UnknownStateError(f"session {name} has no checkpoint at {at}; it has {where}")
            for point in points:
                await ledger.refer(tag, point.snapshot)
            life = parent.ttl_s if ttl_s is None else _ttl(ledger, ttl_s)
            child = SessionRecord(tag, ledger.now, 0.0, life, at, name, at, points)
            return await _begin(ledger, changed(child, label=label, metadata=dict(metadata or {})))

        return await self._place.change(split)

    async def begin_append(
        self, tenant: str, name: str, key: str, *, expected_position: int | None = None, digest: str = ""
    ) -> tuple[Append, str]:
        """Become the writer of a session; returns the append under this key, and a token that only this writer has.

        A key that is known is the same append: done, it is answered from what it came to and nothing is fed again (the
        token is ""); half done, it goes on at its `position`, up to which all is in the state; one of which nothing was
        kept begins anew from where the session stands. "" is never known. `expected_position` is where the caller
        thinks the session stands, or stood when the append began.

        Raises: UnknownStateError; InputError for an unusable key; PositionError when the session stands elsewhere;
            BusyError when another writer has it now; ConflictError when the key was used for other contents.
        """
        tag = self._place.tenant(tenant)
        if len(key) > LONGEST_KEY:
            raise InputError(f"an idempotency key of {len(key)} characters was given; it has up to {LONGEST_KEY}")

        async def begin(ledger: StateLedger) -> tuple[Append, str]:
            before = await ledger.owned_session(tag, name)
            append = next((known for known in before.appends if known.key == key), None) if key else None
            if append is not None and not _same_append(append, digest, expected_position):
                raise ConflictError(
                    f"the key {key!r} was used for another append, which began at {append.start}; take a new key"
                )
            if append is not None and append.done:
                return append, ""
            _require_no_writer(name, before, ledger)
            if append is None or append.position == append.start:
                known_digest = "" if append is None else append.digest
                append = Append(key, before.position, before.position, digest or known_digest)
                expected = before.position if expected_position is None else expected_position
            else:
                expected = append.position
            if expected != before.position:
                raise _stands_elsewhere(name, append, expected, before.position)
            token = secrets.token_hex(8)
            record = changed(
                before,
                appends=_with(before.appends, append, ledger),
                writer=Writer(key, token, ledger.now + ledger.limits.writer_s, this_process()),
            )
            await _save(ledger, name, record, before)
            return append, token

        return await self._place.change(begin)

    async def advance(self, tenant: str, name: str, token: str, to: Reached) -> Session:
        """Note how far the writer has brought the session.

        Raises: UnknownStateError for a session or snapshot that is not there; ConflictError when this writer was taken
            for dead, or the position lies before the one that the session has.
        """
        tag, position, snapshot = self._place.tenant(tenant), to.position, to.snapshot

        async def move(ledger: StateLedger) -> Session:
            before = await ledger.owned_session(tag, name)
            writer = before.writer
            if writer is None or writer.token != token:
                raise ConflictError(f"session {name} was given to another writer; nothing of this one is kept")
            if position < before.position:
                raise ConflictError(f"session {name} stands at {before.position} and cannot go back to {position}")
            await ledger.refer(tag, snapshot)
            points = [point for point in before.checkpoints if point.position != position]
            gone = [point for point in before.checkpoints if point.position == position]
            points.append(Checkpoint(position, snapshot, ledger.now))
            spare = max(0, len(points) - ledger.limits.session_checkpoints)
            for point in gone + points[:spare]:
                await ledger.release(point.snapshot)
            append = next(known for known in before.appends if known.key == writer.key)
            append = changed(
                append,
                position=position,
                done=to.done,
                result=to.result,
                fed=to.fed,
                digest=append.digest or to.digest,
            )
            record = changed(
                before,
                position=position,
                checkpoints=tuple(points[spare:]),
                appends=_with(before.appends, append, ledger),
                writer=None if to.done else changed(writer, until=ledger.now + ledger.limits.writer_s),
            )
            return await _save(ledger, name, record, before)

        return await self._place.change(move)

    async def keep_writing(self, tenant: str, name: str, token: str) -> None:
        """Note that the writer lives; to be called more often than every `writer_s`.

        Raises: UnknownStateError; ConflictError when it was taken for dead.
        """
        tag = self._place.tenant(tenant)

        async def renew(ledger: StateLedger) -> None:
            before = await ledger.owned_session(tag, name)
            if before.writer is None or before.writer.token != token:
                raise ConflictError(f"session {name} was given to another writer; nothing of this one is kept")
            writer = changed(before.writer, until=ledger.now + ledger.limits.writer_s)
            await _save(ledger, name, changed(before, writer=writer), before)

        await self._place.change(renew)

    async def stop_writing(self, tenant: str, name: str, token: str) -> None:
        """Give up writing: what was advanced stays, and an append with the same key goes on from there.

        Raises: UnknownStateError.
        """
        tag = self._place.tenant(tenant)

        async def stop(ledger: StateLedger) -> None:
            before = await ledger.owned_session(tag, name)
            if before.writer is not None and before.writer.token == token:
                await _save(ledger, name, changed(before, writer=None), before)

        await self._place.change(stop)


async def _begin(ledger: StateLedger, record: SessionRecord) -> Session:
    limit = ledger.limits.tenant_sessions
    if (await ledger.used(record.tenant)).sessions >= limit:
        raise QuotaError(f"this caller has {limit} sessions, which is the limit; delete some, or let them expire")
    name = f"sess_{secrets.token_hex(20)}"
    return await _save(ledger, name, record)


async def _save(ledger: StateLedger, name: str, record: SessionRecord, before: SessionRecord | None = None) -> Session:
    """Write a session that was used now."""
    record = changed(record, expires_at=ledger.now + record.ttl_s)
    await ledger.save(name, record, before)
    return record.shown(name)


def _require_no_writer(name: str, record: SessionRecord, ledger: StateLedger) -> None:
    left = 0.0 if record.writer is None else record.writer.until - ledger.now
    if record.writer is not None and left > 0 and not has_died(record.writer.owner):
        raise BusyError(f"session {name} is being written to; try again when that append has ended", retry_s=left)


def _stands_elsewhere(name: str, append: Append, expected: int, position: int) -> PositionError:
    """Make the refusal of an append that cannot begin, or go on, at the `expected` position of the session."""
    if append.position == append.start:
        words = f"session {name} stands at {position}, not at {expected}; append from there"
        return PositionError(words, expected=expected, position=position)
    return PositionError(
        f"the append under the key {append.key!r} broke off: its tokens from {append.start} to {expected} are in "
        f"session {name}, and another writer has gone on from there to {position}, so its rest cannot follow; append "
        f"what is missing under a new key, or fork the session at {expected} and append it there",
        expected=expected,
        position=position,
        start=append.start,
    )


def _same_append(append: Append, digest: str, expected_position: int | None) -> bool:
    """Return whether an append under a known key may be the same as before."""
    same_digest = not digest or not append.digest or digest == append.digest
    # An append of which nothing is kept may begin anew elsewhere than at first.
    nothing_kept = append.position == append.start and not append.done
    return same_digest and (nothing_kept or expected_position in (None, append.start))


def _with(appends: tuple[Append, ...], append: Append, ledger: StateLedger) -> tuple[Append, ...]:
    """Put this append last, as the newest; the oldest are forgotten."""
    others = tuple(known for known in appends if known.key != append.key)
    return (*others, append)[-ledger.limits.session_appends :]


def _ttl(ledger: StateLedger, seconds: float | None) -> float:
    life = ledger.limits.session_ttl_s if seconds is None else seconds
    longest = ledger.limits.longest_ttl_s
    if not min(LEAST_TTL_S, longest) <= life <= longest:
        raise InputError(f"a session's life of {life:g} s was asked for; it may have {LEAST_TTL_S:g} to {longest:g} s")
    return life
