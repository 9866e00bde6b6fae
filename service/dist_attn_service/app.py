"""The application: made by a function, its parts owned by the lifespan."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, TypedDict

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from dist_attn import __version__
from dist_attn.errors import DistAttnError
from dist_attn.store import StateStore
from dist_attn.store.private import make_private
from dist_attn.text import fitted, load_tokeniser
from dist_attn.wire.curve import ClientKeys
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.logs import Log, make_log
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside
from dist_attn_service.base.tracing import Tracing
from dist_attn_service.completions.chat import ChatService
from dist_attn_service.completions.chat_template import ChatTemplate
from dist_attn_service.completions.prefixes import PrefixCache
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.completions.run import CompletionService
from dist_attn_service.completions.whole import gather, whole_completion
from dist_attn_service.dependencies import Services, SessionServices
from dist_attn_service.encodings.documents import DocumentService
from dist_attn_service.encodings.embeddings import EmbeddingService
from dist_attn_service.encodings.estimates import EstimateService
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.engine.port import EnginePort, ZmqEnginePort
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import StreamLimits
from dist_attn_service.engine.watch import EngineWatch
from dist_attn_service.engine.workload import Workload
from dist_attn_service.feeding.service import FeedingService
from dist_attn_service.http.auth import KeyRing
from dist_attn_service.http.envelope import Envelope, routing_problem, service_problem
from dist_attn_service.http.limits import BodyMemory, OpenRequests
from dist_attn_service.jobs.api import JobServices
from dist_attn_service.jobs.catalogue import JobCatalogue
from dist_attn_service.jobs.runner import Complete
from dist_attn_service.routers import (
    about,
    completions,
    encodings,
    files,
    jobs,
    search,
    session_text,
    sessions,
    texts,
    uploads,
)
from dist_attn_service.routers.openapi import PROBLEM_RESPONSE, openapi_document
from dist_attn_service.schemas.completions import CompletionRequest
from dist_attn_service.search.service import SearchService
from dist_attn_service.sessions.store_service import StoreService
from dist_attn_service.text.spool import DiskBudget, SpoolFactory
from dist_attn_service.text.tokenising import ThreadTokeniser
from dist_attn_service.uploads.service import FileService

__all__ = ["create_app", "stream_limits"]

FAREWELL_SECONDS = 3.0
ROUTERS = (completions, encodings, texts, search, jobs, sessions, session_text, files, uploads, about)


class LifespanState(TypedDict):
    """What requests find in `request.state`."""

    services: Services


def create_app(
    settings: Settings, engine: EnginePort | None = None, log: Log | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The service for one model; `engine` and `tracing` replace what the settings name in tests.

    Raises: ConfigError for keys of either kind that cannot be read; at start-up ModelFolderError when the model folder
        cannot be used.
    """
    log = log or make_log(level=settings.log_level, form=settings.log_format)
    metrics, keys = Metrics(), KeyRing.read(settings)
    tracing = tracing or Tracing.of(settings.tracing)
    open_requests = OpenRequests(settings.open_requests)
    port = engine or _connection(settings, log)

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[LifespanState]:
        async with AsyncExitStack() as parts:
            threads = parts.enter_context(ThreadPoolExecutor(settings.threads, thread_name_prefix="work"))
            disk = parts.enter_context(ThreadPoolExecutor(1, thread_name_prefix="disk"))
            try:
                stores = await _open_stores(parts, settings, log)
            except (DistAttnError, ServiceError) as error:
                application.state.cannot_start = str(error)
                raise
            context = _context(settings, port, stores.states.store, metrics, threads, log)
            services = _services(context, stores, disk, open_requests)
            metrics.watch(services.gauges, version=__version__, model=services.model.id)
            await port.start()
            services.jobs.runner.start()
            try:
                yield {"services": services}
            finally:
                await services.jobs.runner.stop()
                await services.prefixes.close()
                await services.feeds.stop()
                await port.close()
                # what was cut off still writes its last words and gives its spools back
                await open_requests.drained(FAREWELL_SECONDS)
                await beside(threads, tracing.flush)

    app = FastAPI(
        title="dist-attn",
        version=__version__,
        description="Encodings and completions of texts of any length by linear attention.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        exception_handlers={ServiceError: service_problem, HTTPException: routing_problem},
        responses={"default": PROBLEM_RESPONSE},
    )
    envelope = Envelope(
        log=log, metrics=metrics, refusal=keys.refusal, whereabouts=lambda: _whereabouts(port), tracing=tracing
    )
    app.add_middleware(envelope.around)
    # what the server below the app, which sees broken requests and the end first, needs of it
    app.state.refused = envelope.refused
    app.state.open_requests = open_requests
    app.state.cannot_start = ""
    for family in ROUTERS:
        app.include_router(family.router)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    return app


class Stores(NamedTuple):
    """What outlives this process."""

    states: StoreService
    jobs: JobCatalogue
    files: FileService


async def _open_stores(parts: AsyncExitStack, settings: Settings, log: Log) -> Stores:
    """Raises: DistAttnError, ServiceError for a folder whose contents cannot be used."""
    return Stores(
        await parts.enter_async_context(StoreService.opened(settings, log)),
        await parts.enter_async_context(JobCatalogue.opened(settings)),
        await parts.enter_async_context(FileService.opened(settings, log)),
    )


def _connection(settings: Settings, log: Log) -> EnginePort:
    """The way to the controller."""
    return ZmqEnginePort(
        settings.api_address,
        stream_limits(settings),
        log,
        status_seconds=settings.status_seconds,
        stale_seconds=settings.status_stale_seconds,
        keys=ClientKeys.find(settings.keys_dir, "api", settings.api_address),
    )


def stream_limits(settings: Settings) -> StreamLimits:
    """The settings that an engine port needs."""
    return StreamLimits(
        silence_seconds=settings.engine_silence_seconds,
        message_tokens=settings.message_tokens,
        inbox_soft_bytes=settings.inbox_soft_bytes,
        inbox_hard_bytes=settings.inbox_hard_bytes,
        resend_bytes=settings.resend_bytes,
        resend_seconds=settings.engine_ready_seconds,
    )


def _whereabouts(engine: EnginePort) -> dict[str, Any]:
    """Epoch and step of the engine, for the log."""
    status = engine.health().status
    return {} if status is None else {"epoch": status.epoch, "step": status.step}


def _context(
    settings: Settings, engine: EnginePort, store: StateStore, metrics: Metrics, threads: Executor, log: Log
) -> ServiceContext:
    """Read the model folder, and what every kind of work shares.

    Raises: ModelFolderError when the folder cannot be used.
    """
    model = ServedModel.read(settings.model, settings.served_model_name)
    tokeniser = ThreadTokeniser(fitted(load_tokeniser(settings.model), settings.model, model.vocab_size), threads)
    watch = EngineWatch(engine, model, settings)
    return ServiceContext(settings, model, engine, watch, tokeniser, store, Workload(), metrics, threads, log)


def _services(context: ServiceContext, stores: Stores, disk: Executor, open_requests: OpenRequests) -> Services:
    """Put the parts together."""
    settings = context.settings
    folder = settings.data_dir / "spool"
    make_private(folder)
    budget = DiskBudget(settings.disk_bytes)
    spools = SpoolFactory(folder, memory=settings.spool_memory_bytes, budget=budget, disk=disk)
    prefixes = PrefixCache(context)
    completions, embeddings = CompletionService(context, prefixes), EmbeddingService(context)
    kept_jobs = JobServices.over(stores.jobs, context, _complete(context, completions))
    return Services(
        **vars(context),
        completions=completions,
        prefixes=prefixes,
        chat=ChatService(context, ChatTemplate.read(settings.model, context.tokeniser.special_tokens)),
        documents=DocumentService(context, spools),
        embeddings=embeddings,
        estimates=EstimateService(context),
        sessions=SessionServices.over(stores.states, context),
        jobs=kept_jobs,
        search=SearchService(context, embeddings, kept_jobs),
        open_requests=open_requests,
        json_memory=BodyMemory(settings.json_memory_bytes),
        budget=budget,
        files=stores.files,
        feeds=FeedingService(context, stores.files),
    )


def _complete(context: ServiceContext, completions: CompletionService) -> Complete:
    """How a job draws a completion."""

    async def run(options: dict[str, Any], name: str, drawn: Callable[[int], None]) -> bytes:
        request = CompletionRequest.model_validate(options)
        prepared = await prepare(context, request, RequestTerms.of_body(request))
        choices, usage = await gather(
            completions,
            prepared,
            name,
            counted=context.metrics.completion,
            drawn=lambda usage: drawn(usage.completion_tokens),
        )
        return msgspec.json.encode(whole_completion(prepared, context.model.id, choices, usage))

    return run
