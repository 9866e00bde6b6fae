"""What every kind of work in the engine shares in one process: handed on as one value, made once by the lifespan."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from dist_attn.store import StateStore
from dist_attn.wire.messages import OpenWork
from dist_attn_service.base.logs import Log
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.engine.port import EnginePort
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.watch import EngineWatch
from dist_attn_service.engine.workload import Workload
from dist_attn_service.text.tokenising import TokeniserPort

__all__ = ["ServiceContext"]

T = TypeVar("T")


@dataclass(frozen=True)
class ServiceContext:
    """The engine and its health, the model that is served and its tokeniser, the store of states, and what counts."""

    settings: Settings
    model: ServedModel
    engine: EnginePort
    watch: EngineWatch
    tokeniser: TokeniserPort
    store: StateStore
    workload: Workload
    metrics: Metrics
    threads: Executor
    log: Log

    async def beside(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs beside the event loop."""
        return await beside(self.threads, work)

    @asynccontextmanager
    async def open(self, work: OpenWork) -> AsyncIterator[EngineStream]:
        """A request in the engine, once its controller has taken it; leaving early cancels it there.

        Raises: ServiceError when the engine does not take it.
        """
        with self.engine.open(work) as stream:
            await stream.admitted(self.settings.admission_seconds)
            yield stream
