"""A caller's sessions and their states in the store: made, looked at, listed, forked, read, replaced, ended."""

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from starlette.datastructures import Headers

from dist_attn.errors import DistAttnError
from dist_attn.store import Session, SnapshotInfo, StateStore
from dist_attn.wire.manifest import ModelIdentity, require_same_model
from dist_attn.wire.snapshot import SnapshotHeader, SnapshotParser, check_position, header_of
from dist_attn_api import types
from dist_attn_service.base.errors import BadRequest, NotFound, TooLarge
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.schemas.base import ListOptions
from dist_attn_service.schemas.stored import CreateSession, ForkSession
from dist_attn_service.sessions.answers import entity_tag, expected_digest, require_match, store_refusals


@final
class SessionCatalogue:
    """The work on sessions that needs only the store. All methods raise ServiceError for what the store refuses."""

    def __init__(self, store: StateStore, model: str) -> None:
        self._store = store
        self._model = model

    async def create(self, caller: str, request: CreateSession) -> types.Session:
        """Create a session without a text."""
        with store_refusals():
            session = await self._store.sessions.create(
                caller, ttl_s=request.ttl_seconds, label=request.name or "", metadata=request.metadata
            )
        return self.shown(session)

    async def get(self, caller: str, session_id: str) -> types.Session:
        """Find a session, with the revision of its state's model."""
        with store_refusals():
            session = await self._store.sessions.get(caller, session_id)
        return self.shown(session, await self._revision(caller, session))

    async def page(self, caller: str, options: ListOptions) -> types.SessionList:
        """A page of the caller's sessions."""
        with store_refusals():
            sessions = await self._store.sessions.listed(caller, after=options.after, limit=options.limit + 1)
        shown = [self.shown(session) for session in sessions[: options.limit]]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return types.SessionList(data=shown, first_id=first, last_id=last, has_more=len(sessions) > options.limit)

    async def delete(self, caller: str, session_id: str) -> None:
        """End a session."""
        with store_refusals():
            await self._store.sessions.delete(caller, session_id)

    async def fork(self, caller: str, session_id: str, request: ForkSession) -> types.Session:
        """Create a session that goes on from a checkpoint of this one, whose whole state is read and checked first."""
        with store_refusals():
            parent = await self._store.sessions.get(caller, session_id)
            at = parent.position if request.position is None else request.position
            for point in parent.checkpoints:
                if point.position == at:
                    check_position(at)
                    await self._store.snapshots.check(caller, point.snapshot)
            session = await self._store.sessions.fork(
                caller,
                session_id,
                position=at,
                ttl_s=request.ttl_seconds,
                label=request.name or "",
                metadata=request.metadata,
            )
        return self.shown(session)

    async def checkpoints(self, caller: str, session_id: str) -> types.CheckpointList:
        """The checkpoints of a session."""
        with store_refusals():
            checkpoints = await self._store.sessions.checkpoints(caller, session_id)
        points = [
            types.Checkpoint(
                position=point.position,
                created_at=int(point.made_at),
                bytes=info.size,
                etag=entity_tag(info.digest),
            )
            for point, info in checkpoints
        ]
        return types.CheckpointList(data=points)

    async def _revision(self, caller: str, session: Session) -> str | None:
        """The revision of the newest state's model; None without one, and where it is damaged or cannot be read."""
        if not session.checkpoints:
            return None
        with suppress(DistAttnError):
            newest = await self._store.snapshots.beginning(caller, session.checkpoints[-1].snapshot)
            return header_of(newest).manifest.model.revision
        return None

    def shown(self, session: Session, revision: str | None = None) -> types.Session:
        """A session as its owner sees it."""
        return types.Session(
            id=session.id,
            model=self._model,
            position=session.position,
            checkpoints=[point.position for point in session.checkpoints],
            created_at=int(session.made_at),
            expires_at=int(session.expires_at),
            busy=session.busy_until > time.time(),
            name=session.label or None,
            metadata=session.metadata,
            parent=session.parent or None,
            parent_position=session.parent_position if session.parent else None,
            revision=revision,
        )


NO_STATE = "has no state yet, for nothing was appended; append a text, or put a state"


@dataclass(frozen=True)
class StoredState:
    """A state in the store: its position, and the snapshot file."""

    position: int
    snapshot: SnapshotInfo

    @property
    def tag(self) -> str:
        """The entity tag of the snapshot file."""
        return entity_tag(self.snapshot.digest)


@final
class SessionStates:
    """The service that reads and replaces states; holds nothing of any one session."""

    def __init__(self, store: StateStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    async def find(self, caller: str, session_id: str, position: int | None = None) -> StoredState:
        """Find the state at a checkpoint, or without a position the newest one.

        Raises: NotFound for a session, a checkpoint or a state that is not there.
        """
        with store_refusals():
            checkpoints = await self._store.sessions.checkpoints(caller, session_id)
        if not checkpoints:
            raise NotFound(f"session {session_id} {NO_STATE}")
        at = checkpoints[-1][0].position if position is None else position
        for point, info in checkpoints:
            if point.position == at:
                return StoredState(at, info)
        there = ", ".join(str(point.position) for point, _ in checkpoints)
        raise NotFound(f"session {session_id} has no checkpoint at {at}; it has {there}", param="position")

    async def pieces(self, caller: str, state: StoredState) -> AsyncIterator[bytes]:
        """Read a snapshot file, which is opened before this returns.

        Raises: NotFound when it was removed meanwhile; ServiceError when it cannot be read.
        """
        stream = self._store.snapshots.get(caller, state.snapshot.id)
        with store_refusals():
            first = await anext(stream)

        async def rest() -> AsyncIterator[bytes]:
            yield first
            with store_refusals():
                async for piece in stream:
                    yield piece

        return rest()

    async def put(
        self, caller: str, session_id: str, body: RequestBody, headers: Headers, served: ModelIdentity
    ) -> StoredState:
        """Take a snapshot file as the session's state, once all of it has come and is sound.

        Raises: ServiceError for preconditions that fail, bytes that are no snapshot or too many, the state of another
            model; the session then keeps its state.
        """
        digest = expected_digest(headers)
        with store_refusals():
            session = await self._store.sessions.get(caller, session_id)
            before = session.checkpoints[-1].snapshot if session.checkpoints else ""
            tag = entity_tag((await self._store.snapshots.stat(caller, before)).digest) if before else ""
        require_match(headers, tag)
        parser = SnapshotParser(max_bytes=self._max_bytes)
        with store_refusals():
            info = await self._store.snapshots.put(caller, self._checked(body, parser, digest, served))
            header = parser.header
            assert header is not None
            await self._store.sessions.replace(caller, session_id, header.position, info.id, instead_of=before)
        return StoredState(header.position, info)

    async def _checked(
        self, body: RequestBody, parser: SnapshotParser, digest: str, served: ModelIdentity
    ) -> AsyncIterator[bytes]:
        """Yield the body's bytes, as long as they can be those of a state of the served model."""
        seen, header_is_new = hashlib.sha256(), True
        async for chunk in body.chunks():
            if body.bytes > self._max_bytes:
                raise TooLarge(f"more than {self._max_bytes} bytes came for a state, which is this service's limit")
            parser.feed(chunk)
            seen.update(chunk)
            if header_is_new and parser.header is not None:
                _require_usable(parser.header, served)
                header_is_new = False
            yield chunk
        parser.finish()
        if digest and seen.hexdigest() != digest:
            raise BadRequest(
                f"the body's SHA-256 is {seen.hexdigest()}, and Content-Digest says {digest}; send the file again"
            )


def _require_usable(header: SnapshotHeader, served: ModelIdentity) -> None:
    """Check a header. Raises: StateMismatchError for a state of another model; BadRequest for one of no text."""
    require_same_model(header.manifest.model, served)
    if not header.position:
        raise BadRequest("the state has seen no token; a session without a text has none: create one")
