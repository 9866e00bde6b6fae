"""Work in the engine: the parts that all kinds of it share, and one request, from its tokens to its results."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, final

import numpy as np

from dist_attn.errors import DistAttnError, StorageError
from dist_attn.store import StateStore
from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import Manifest, RestoreReport
from dist_attn.wire.messages import BeginState, Checkpoint, Done, Generated, OpenWork, Progress, Restored, Rows
from dist_attn.wire.snapshot import header_of
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.base.logs import Log
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside, task_group
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.engine.port import EngineKind, EnginePort
from dist_attn_service.engine.resending import EngineEvent
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.watch import EngineWatch
from dist_attn_service.engine.workload import Workload
from dist_attn_service.text.tokenising import ThreadTokeniser

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ServiceContext:
    """The parts that all work with one model shares: engine, tokeniser, store of states, measures and threads."""

    settings: Settings
    model: ServedModel
    engine: EnginePort
    watch: EngineWatch
    tokeniser: ThreadTokeniser
    store: StateStore
    workload: Workload
    metrics: Metrics
    threads: Executor
    log: Log

    def __post_init__(self) -> None:
        self.engine.discard_with(self.store.snapshots.discard)

    async def beside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, which runs beside the event loop."""
        return await beside(self.threads, work, *args, **kwargs)

    @asynccontextmanager
    async def open(
        self, work: OpenWork, like: Manifest | None = None, only: EngineKind | None = None
    ) -> AsyncIterator[EngineStream]:
        """Open a request in the engine, once its controller has taken it; leaving early cancels it there.

        Of several engines it goes to the one that is most `like` this, or to one of this kind `only`.

        Raises: ServiceError when the engine does not take it.
        """
        with self.engine.open(work, like, only) as stream:
            await stream.admitted(self.settings.admission_seconds)
            yield stream

    async def maker(self, caller: str, snapshot: str) -> Manifest | None:
        """The manifest of a stored state, by which one of several engines is chosen; None where they are alike.

        None also for a state that cannot be read: the engine says why.
        """
        manifests = [health.status.manifest for health in self.engine.engines().values() if health.status]
        if any(manifest != manifests[0] for manifest in manifests):
            with suppress(DistAttnError):
                return header_of(await self.store.snapshots.beginning(caller, snapshot)).manifest
        return None


async def begin_from(store: StateStore, caller: str, position: int, snapshot: str) -> BeginState:
    """The state to begin with, which a stored snapshot holds.

    Raises: UnknownStateError, StorageError.
    """
    record = await store.snapshots.lend(caller, snapshot)
    return BeginState(position, record.blob, record.digest, record.size)


async def record_state(store: StateStore, caller: str, state: Checkpoint, *, spare: bool = False) -> str:
    """Record a state that the engine has stored as a snapshot of a caller; return its id. `spare` as for `put`.

    Raises: QuotaError; StorageError, also where the engine could not store it.
    """
    if state.error:
        raise StorageError(state.error)
    return (await store.snapshots.take_over(caller, state.blob, state.digest, state.num_bytes, spare=spare)).id


FRESH = RestoreReport(0, 0, True, "")


@final
@dataclass
class EngineRun:
    """One request: it is fed, and its results are handed on in order; one that was not asked for is an engine's error.

    `on_state` gets a state that the engine has stored, or could not store, and records or discards it. Closing the
    stream leaves a text before its end. `waiting` is entered while the engine is waited for.
    """

    stream: EngineStream
    on_rows: Callable[[Rows], Awaitable[None]] | None = None
    on_tokens: Callable[[Generated], Awaitable[None]] | None = None
    on_progress: Callable[[Progress], Awaitable[None]] | None = None
    on_state: Callable[[Checkpoint], Awaitable[None]] | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    rows: int = 0
    """The number of rows that have come."""
    kept: int | None = None
    """The position of the last state that has come."""
    report: RestoreReport = FRESH
    """The report on restoring the state that the request began with."""

    async def work(self, tokens: TokenArray | AsyncGenerator[TokenArray]) -> None:
        """Feed the whole request; return when the engine has said that this was all, or the stream was closed.

        Raises: ServiceError of the engine, of the tokens, or of the callbacks.
        """
        with ExitStack() as until_done:
            async with task_group() as group:
                group.create_task(self._feed(tokens, until_done))
                while (event := await self.stream.next()) is not None:
                    await self._take(event)

    def ends_at(self, position: int) -> bool:
        """Return whether the text ends at this position, as far as is known by now."""
        return self.stream.final_sent and position == self.stream.sent

    async def _feed(self, tokens: TokenArray | AsyncGenerator[TokenArray], until_done: ExitStack) -> None:
        last: TokenArray = np.empty(0, dtype=np.int32)
        if isinstance(tokens, np.ndarray):
            last = tokens
        else:
            async with aclosing(tokens):
                async for piece in tokens:
                    with self.waiting():
                        await self.stream.send(piece, final=False)
        until_done.enter_context(self.waiting())
        await self.stream.send(last, final=True)

    async def _take(self, event: EngineEvent) -> None:
        match event:
            case Rows() if self.on_rows is not None:
                await self.on_rows(event)
                self.rows += len(event.starts)
            case Generated() if self.on_tokens is not None:
                await self.on_tokens(event)
            case Progress() if self.on_progress is not None:
                await self.on_progress(event)
            case Restored():
                self.report = event.report
            case Checkpoint(position=position, drawn=drawn) if (
                self.on_state is not None and position - drawn <= self.stream.sent
            ):
                await self.on_state(event)
                self.kept = position
            case Done(position=position, drawn=drawn, rows=rows) if self.on_state is None or position == self.kept:
                self._require(position - drawn, rows)
            case _:
                if isinstance(event, Checkpoint):
                    self.stream.discard(event)
                at = f"up to {self.stream.sent}" + ", the last" * self.stream.final_sent
                raise EngineFailure(f"the engine answered a request with tokens {at}, with {event!r:.200}")

    def _require(self, tokens: int, rows: int) -> None:
        """Check these counts against the tokens and rows that went through this service. Raises: EngineFailure."""
        if not self.stream.final_sent or (tokens, rows) != (self.stream.sent, self.rows):
            raise EngineFailure(
                f"the engine counted {tokens} tokens and {rows} rows where {self.stream.sent} and {self.rows} "
                "went through this service"
            )
