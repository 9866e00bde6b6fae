"""The one writer of a session: begun by an append, kept alive while work goes on, given back at its end."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import final

from dist_attn.errors import DistAttnError, StorageError
from dist_attn.store import Append, Reached, Session, StateStore
from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import Manifest, RestoreReport
from dist_attn.wire.messages import BeginState, Checkpoint
from dist_attn.wire.snapshot import check_position
from dist_attn_service.base.errors import ClientGone, ServiceError
from dist_attn_service.base.tasks import task_group
from dist_attn_service.engine.run import EngineRun, ServiceContext, begin_from, record_state
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.sessions.answers import store_refusals
from dist_attn_service.text.tokenising import Piece

BEATS = 4  # signs of life in the time after which a silent writer is taken for dead


@final
@dataclass
class SessionWriter:
    """The writer of a session for one append (or one generate, which appends what it draws).

    `append` is the store's record of it; `kept` is the position up to which everything is in the store.
    """

    store: StateStore = field(repr=False)
    caller: str = field(repr=False)
    session: Session
    append: Append
    token: str = field(repr=False)
    kept: int = 0
    done: bool = False

    async def begin(self) -> BeginState | None:
        """The state to go on from; None at the beginning of a text.

        Raises: ServiceError when the state is gone.
        """
        point = self.session.checkpoint()
        return None if point is None else await self.begin_at(point.position, point.snapshot)

    async def begin_at(self, position: int, snapshot: str) -> BeginState:
        """The state of this snapshot, to go on from.

        Raises: ServiceError when it is gone.
        """
        with store_refusals():
            check_position(position)
            return await begin_from(self.store, self.caller, position, snapshot)

    async def maker(self, context: ServiceContext) -> Manifest | None:
        """The manifest of the state to go on from, as `ServiceContext.maker`; None at the beginning of a text."""
        point = self.session.checkpoint()
        return None if point is None else await context.maker(self.caller, point.snapshot)

    async def keep(self, state: Checkpoint) -> str:
        """Record a state that the engine has stored; it is not the session's yet.

        Raises: ServiceError when there is no room, or the store fails.
        """
        with store_refusals():
            return await record_state(self.store, self.caller, state)

    async def advance(self, to: Reached) -> Session:
        """Move the session to this position and state.

        Raises: ServiceError when this writer was taken for dead, or the session is gone.
        """
        with store_refusals():
            self.session = await self.store.sessions.advance(self.caller, self.session.id, self.token, to)
        self.kept, self.done = to.position, to.done
        return self.session


@asynccontextmanager
async def writing(
    store: StateStore, caller: str, session_id: str, key: str, expected_position: int | None, *, digest: str = ""
) -> AsyncIterator[SessionWriter]:
    """Be the writer of a session in the block. An append that was done before gives a writer that is `done`.

    Raises: ServiceError when the session has another position or writer, or the key was used for other contents; in
        the block as soon as the store gives the session to another writer. The `position` of an error that ends the
        block is that up to which everything is kept.
    """
    with store_refusals():
        append, token = await store.sessions.begin_append(
            caller, session_id, key, expected_position=expected_position, digest=digest
        )
        session = await store.sessions.get(caller, session_id)
    writer = SessionWriter(store, caller, session, append, token, append.position, not token)
    if writer.done:
        yield writer
        return
    try:
        async with task_group() as group:
            beat = group.create_task(_live(writer, store.limits.writer_s / BEATS))
            yield writer
            beat.cancel()
    except ServiceError as error:
        error.facts.setdefault("position", writer.kept)
        raise
    finally:
        if not writer.done:
            # Done even while this task is cancelled, so that a session without a writer is free.
            with contextlib.suppress(DistAttnError):
                await asyncio.shield(store.sessions.stop_writing(caller, session_id, token))


async def _live(writer: SessionWriter, seconds: float) -> None:
    """Tell the store that the writer lives, until it is done."""
    while not writer.done:
        await asyncio.sleep(seconds)
        try:
            await writer.store.sessions.keep_writing(writer.caller, writer.session.id, writer.token)
        except StorageError:
            continue  # asked again; only a state that the store does not take is an error
        except DistAttnError:
            if not writer.done:
                with store_refusals():
                    raise


Advance = Callable[[int, str], Awaitable[None]]


@final
class TextRun:
    """The work on one text. `advance` moves the session to a position on the way, with the state kept for it."""

    def __init__(self, context: ServiceContext, writer: SessionWriter, advance: Advance) -> None:
        self._context = context
        self._writer = writer
        self._advance = advance
        self.position = writer.append.position
        """The session's position after the last token that came."""
        self.snapshot = ""
        """The id of the state that was kept last."""
        self.moved = asyncio.Event()
        """Set whenever the session advances, and by an append for each piece of its text."""

    async def work(self, stream: EngineStream, pieces: AsyncGenerator[Piece]) -> RestoreReport:
        """Feed the text to its end, as fast as the engine gives credit: then `snapshot` is the state there.

        Raises: ServiceError; ClientGone when the text breaks off, once every whole state of what came is kept.
        """
        run = EngineRun(stream)

        async def on_state(state: Checkpoint) -> None:
            self.snapshot = await self._writer.keep(state)
            if not run.ends_at(state.position):
                await self._advance(state.position, self.snapshot)
                self.moved.set()
            if self._context.engine.engines():  # another one may have to read it
                stream.recorded_as(await self._writer.begin_at(state.position, self.snapshot))

        run.on_state = on_state
        await run.work(self._tokens(pieces))
        return run.report

    async def _tokens(self, pieces: AsyncGenerator[Piece]) -> AsyncGenerator[TokenArray]:
        """Yield the tokens that are not in the state to begin with."""
        start, known = self._writer.append.start, self._writer.append.position
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    stop = start + piece.mark.tokens
                    self.position = max(self.position, stop)
                    yield piece.tokens[max(0, known - stop + len(piece.tokens)) :]
        except ClientGone:
            await self._until_kept()
            raise

    async def _until_kept(self) -> None:
        """Wait for the last state that comes back without the end of the text."""
        grid = self._context.watch.manifest().computed.chunk_tokens
        every = -(-self._context.settings.checkpoint_tokens // grid) * grid
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.detached_seconds):
                while self.position // every * every > self._writer.kept:
                    self.moved.clear()
                    await self.moved.wait()
