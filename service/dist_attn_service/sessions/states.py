"""The state of a session as a file: read from the store, and put in it, a piece at a time."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import final

from starlette.datastructures import Headers

from dist_attn.store import SnapshotInfo, StateStore
from dist_attn.wire.manifest import ModelIdentity, require_same_model
from dist_attn.wire.snapshot import SnapshotHeader, SnapshotParser
from dist_attn_service.base.errors import BadRequest, NotFound, TooLarge
from dist_attn_service.http.exchange import RequestBody
from dist_attn_service.sessions.headers import entity_tag, expected_digest, require_match
from dist_attn_service.sessions.refusals import store_refusals

NO_STATE = "has no state yet, for nothing was appended; append a text, or put a state"


@dataclass(frozen=True)
class StoredState:
    """A state in the store: where it stands in its text, and the snapshot file."""

    position: int
    snapshot: SnapshotInfo

    @property
    def tag(self) -> str:
        """Its entity tag."""
        return entity_tag(self.snapshot.digest)


@final
class SessionStates:
    """Reads and replaces states; holds nothing of any one session."""

    def __init__(self, store: StateStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes

    async def find(self, caller: str, session_id: str, position: int | None = None) -> StoredState:
        """The state at a checkpoint, the newest without a position.

        Raises: NotFound for a session, a checkpoint or a state that is not there.
        """
        with store_refusals():
            found = await self._store.sessions.checkpoints(caller, session_id)
        if not found:
            raise NotFound(f"session {session_id} {NO_STATE}")
        at = found[-1][0].position if position is None else position
        for point, info in found:
            if point.position == at:
                return StoredState(at, info)
        there = ", ".join(str(point.position) for point, _ in found)
        raise NotFound(f"session {session_id} has no checkpoint at {at}; it has {there}", param="position")

    async def pieces(self, caller: str, state: StoredState) -> AsyncIterator[bytes]:
        """The snapshot file. It is looked for before the first piece is asked for.

        Raises: NotFound when it went meanwhile; ServiceError when it cannot be read.
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
            model; what stood there stays then.
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
        """The body's bytes, as far as they can be those of a state of the served model."""
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
    """Raises: StateMismatchError for a state of another model; BadRequest for one of no text."""
    require_same_model(header.manifest.model, served)
    if not header.position:
        raise BadRequest("the state has seen no token; a session without a text has none: create one")
