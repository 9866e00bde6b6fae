"""The services that routes share: built once by the lifespan, reached through the request, never a module's global."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from dist_attn.wire.messages import RowSpec
from dist_attn.wire.specs import RowChoiceError, choose_rows
from dist_attn_api.types import CompletionUsage
from dist_attn_service.base.errors import BadRequest, Code, NotFound
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside
from dist_attn_service.completions.chat import ChatService
from dist_attn_service.completions.prefixes import PrefixCache
from dist_attn_service.completions.run import CompletionService
from dist_attn_service.encodings.documents import DocumentService
from dist_attn_service.encodings.embeddings import EmbeddingService
from dist_attn_service.encodings.estimates import EstimateService
from dist_attn_service.engine.metrics import Gauges, Metrics
from dist_attn_service.engine.port import EngineHealth
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.feeding import FeedingService
from dist_attn_service.http.limits import BodyMemory, RequestLimit
from dist_attn_service.jobs.api import JobServices
from dist_attn_service.search.service import SearchService
from dist_attn_service.sessions.append import AppendService
from dist_attn_service.sessions.generate import GenerateService
from dist_attn_service.sessions.store_service import StoreService
from dist_attn_service.sessions.stored import SessionCatalogue, SessionStates
from dist_attn_service.text.extraction import Extraction
from dist_attn_service.text.spool import DiskBudget
from dist_attn_service.uploads.service import FileService

__all__ = ["ModelServices", "Services"]

P = ParamSpec("P")
T = TypeVar("T")
VECTORS = ("encodings", "embeddings", "search", "rerank")
"""The work that the encoder does where a request names no model."""


class SessionServices:
    """The services of sessions, over one store, which is also the context's."""

    def __init__(self, stored: StoreService, context: ServiceContext) -> None:
        self.stored = stored
        self.catalogue = SessionCatalogue(context.store, context.model.id)
        self.states = SessionStates(context.store, context.settings.store.snapshot_bytes)
        self.appends = AppendService(context)
        self.generations = GenerateService(context)


@dataclass(frozen=True, kw_only=True)
class ModelServices(ServiceContext):
    """The services of one model, and all that they share."""

    completions: CompletionService
    prefixes: PrefixCache
    chat: ChatService
    documents: DocumentService
    embeddings: EmbeddingService
    estimates: EstimateService

    def rows(self, granularity: str, window: int | None = None, pooling: str | None = None) -> RowSpec:
        """The spec of the rows that are asked for; the model decides about an option that is None.

        Raises: BadRequest for rows that the model does not give.
        """
        try:
            return choose_rows(granularity, window, pooling, self.model.reading)
        except RowChoiceError as error:
            raise BadRequest(str(error), code=Code.UNSUPPORTED_PARAMETER, param=error.option) from None


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that a route may need: those of each model, and all that they share.

    Without an encoder the first model is the only one. Sessions are the first one's.
    """

    models: tuple[ModelServices, ...]
    searches: tuple[SearchService, ...]
    """The searches of each model."""
    settings: Settings
    metrics: Metrics
    threads: Executor
    sessions: SessionServices
    jobs: JobServices
    open_requests: RequestLimit
    json_memory: BodyMemory
    search_memory: BodyMemory
    budget: DiskBudget
    extraction: Extraction
    files: FileService
    feeds: FeedingService
    started: float = field(default_factory=time.monotonic)

    async def beside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, which runs beside the event loop."""
        return await beside(self.threads, work, *args, **kwargs)

    @property
    def writer(self) -> ModelServices:
        """The model that draws texts where a request names none."""
        return self.models[0]

    @property
    def encoder(self) -> ModelServices:
        """The model that makes vectors where a request names none."""
        return self.models[-1]

    def search_by(self, served: ModelServices) -> SearchService:
        """Searches and rerankings by the vectors of a model."""
        return self.searches[self.models.index(served)]

    def context_for(self, name: str | None, capability: str = "") -> ModelServices:
        """The model that a request names or, where it names none, the one that does this kind of work by itself.

        `capability` is one of `ServedModel.capabilities` that the request needs, or `sessions`; without one any model
        will do.

        Raises: NotFound for a name of none of the models, BadRequest for a model that cannot do it.
        """
        if name is None:
            served = self.encoder if capability in VECTORS else self.writer
        else:
            served = self._named(name)
        if capability == "sessions" and served is not self.writer:
            raise BadRequest(
                f"sessions are for {self.writer.model.id!r}, the model {served.model.id!r} has none; leave model out",
                code=Code.UNSUPPORTED_PARAMETER,
                param="model",
            )
        needed = "completions" if capability == "sessions" else capability
        if needed and needed not in served.model.capabilities:
            raise self._unable(served, needed)
        return served

    def _named(self, name: str) -> ModelServices:
        for served in self.models:
            if name in served.model.ids:
                return served
        ids = [served_id for served in self.models for served_id in served.model.ids]
        raise NotFound(
            f"the model {name[:200]!r} is not served here; {' or '.join(map(repr, ids))} is",
            code=Code.MODEL_NOT_FOUND,
            param="model",
        )

    def _unable(self, served: ModelServices, needed: str) -> BadRequest:
        able = [other.model.id for other in self.models if needed in other.model.capabilities]
        if needed == "completions":
            words = (
                f"the model {served.model.id!r} makes vectors of texts and writes none; send the text to /v1/embeddings"
            )
            remedy = f"name {able[0]!r}, which writes" if able else "serve a language model"
        else:
            words = f"the model {served.model.id!r} does not answer /v1/{needed}"
            remedy = f"name {able[0]!r}, which does" if able else "serve one that does"
        return BadRequest(f"{words}, or {remedy}", code=Code.UNSUPPORTED_PARAMETER, param="model")

    def count(self, record: RequestRecord, kind: str, tokens: int) -> None:
        """Count the tokens that a request read, for its line of log and for the metrics."""
        record.note(tokens=tokens)
        self.metrics.tokens(kind, tokens)

    def count_completion(self, record: RequestRecord, usage: CompletionUsage) -> None:
        """Count the tokens of a completion, however it ended, for its line of log and for the metrics."""
        record.note(completion_tokens=usage.completion_tokens)
        record.reached["completion_tokens"] = usage.completion_tokens
        self.metrics.completion(usage)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for an engine."""
        return sum(served.watch.waiting for served in self.models)

    def _engines(self) -> dict[tuple[str, ...], EngineHealth]:
        """The health of each engine, by its model and, where a model has several, its address."""
        found: dict[tuple[str, ...], EngineHealth] = {}
        several = any(served.engine.engines() for served in self.models)
        for served in self.models:
            for address, health in (served.engine.engines() or {"": served.watch.health()}).items():
                found[(served.model.id, address)[: 1 + several]] = health
        return found

    def gauges(self) -> Gauges:
        """The gauges of this moment."""
        stored, files = self.sessions.stored.known_totals, self.files.catalogue.total
        return Gauges(
            self._engines(),
            self.open_requests.count,
            self.waiting,
            self.budget.used,
            stored,
            files.bytes,
            files.entries,
        )
