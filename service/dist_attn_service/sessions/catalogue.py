"""A caller's sessions as they are kept: made, looked at, listed, forked, ended."""

import time
from typing import final

from dist_attn.store import Session, StateStore
from dist_attn_service.schemas.sessions import (
    CheckpointList,
    CheckpointObject,
    CreateSession,
    ForkSession,
    ListOptions,
    SessionList,
    SessionObject,
)
from dist_attn_service.sessions.headers import entity_tag
from dist_attn_service.sessions.refusals import store_refusals


@final
class SessionCatalogue:
    """What needs the store alone, and no engine. All methods raise ServiceError for what the store refuses."""

    def __init__(self, store: StateStore, model: str) -> None:
        self._store = store
        self._model = model

    async def create(self, caller: str, wanted: CreateSession) -> SessionObject:
        """A new session without a text."""
        with store_refusals():
            session = await self._store.sessions.create(
                caller, ttl_s=wanted.ttl_seconds, label=wanted.name or "", metadata=wanted.metadata
            )
        return self.shown(session)

    async def get(self, caller: str, session_id: str) -> SessionObject:
        """A session."""
        with store_refusals():
            return self.shown(await self._store.sessions.get(caller, session_id))

    async def page(self, caller: str, options: ListOptions) -> SessionList:
        """A page of the caller's sessions."""
        with store_refusals():
            found = await self._store.sessions.listed(caller, after=options.after, limit=options.limit + 1)
        shown = [self.shown(session) for session in found[: options.limit]]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return SessionList(data=shown, first_id=first, last_id=last, has_more=len(found) > options.limit)

    async def delete(self, caller: str, session_id: str) -> None:
        """End a session."""
        with store_refusals():
            await self._store.sessions.delete(caller, session_id)

    async def fork(self, caller: str, session_id: str, wanted: ForkSession) -> SessionObject:
        """A session that goes on from a checkpoint of this one, whose state is sound. Cost: a read of that state."""
        with store_refusals():
            parent = await self._store.sessions.get(caller, session_id)
            at = parent.position if wanted.position is None else wanted.position
            for point in parent.checkpoints:
                if point.position == at:
                    await self._store.snapshots.check(caller, point.snapshot)
            session = await self._store.sessions.fork(
                caller,
                session_id,
                position=at,
                ttl_s=wanted.ttl_seconds,
                label=wanted.name or "",
                metadata=wanted.metadata,
            )
        return self.shown(session)

    async def checkpoints(self, caller: str, session_id: str) -> CheckpointList:
        """The checkpoints of a session."""
        with store_refusals():
            found = await self._store.sessions.checkpoints(caller, session_id)
        points = [
            CheckpointObject(
                position=point.position,
                created_at=int(point.made_at),
                bytes=info.size,
                etag=entity_tag(info.digest),
            )
            for point, info in found
        ]
        return CheckpointList(data=points)

    def shown(self, session: Session) -> SessionObject:
        """A session as its owner sees it."""
        return SessionObject(
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
        )
