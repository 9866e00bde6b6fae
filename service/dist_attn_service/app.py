"""The application: made by a function, its parts owned by the lifespan."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, TypedDict

from fastapi import FastAPI

from dist_attn import __version__
from dist_attn.errors import DistAttnError, ModelFolderError
from dist_attn.settings import DataFolder
from dist_attn.store import StateStore
from dist_attn.store.private import make_private
from dist_attn.text import fitted, load_tokeniser
from dist_attn.wire.curve import ClientKeys
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.logs import Log, make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside, stop_tasks
from dist_attn_service.base.tracing import Tracing
from dist_attn_service.completions.chat import ChatService
from dist_attn_service.completions.prefixes import PrefixCache
from dist_attn_service.completions.run import CompletionService
from dist_attn_service.dependencies import ModelServices, Services, SessionServices
from dist_attn_service.encodings.documents import DocumentService
from dist_attn_service.encodings.embeddings import EmbeddingService
from dist_attn_service.encodings.estimates import EstimateService
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.engine.pool import EnginePool
from dist_attn_service.engine.port import EnginePort, ZmqEnginePort
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import StreamLimits
from dist_attn_service.engine.watch import EngineWatch
from dist_attn_service.engine.workload import Workload
from dist_attn_service.feeding import FeedingService
from dist_attn_service.http.auth import KeyRing
from dist_attn_service.http.envelope import EXCEPTION_HANDLERS, Envelope
from dist_attn_service.http.limits import BodyMemory, RequestLimit
from dist_attn_service.jobs.api import JobServices
from dist_attn_service.jobs.catalogue import JobCatalogue
from dist_attn_service.routers import (
    about,
    completions,
    encodings,
    files,
    jobs,
    responses,
    search,
    sessions,
    texts,
    uploads,
)
from dist_attn_service.routers.openapi import PROBLEM_RESPONSE, openapi_document
from dist_attn_service.search.service import SearchService
from dist_attn_service.sessions.store_service import StoreService
from dist_attn_service.text.extraction import Extraction
from dist_attn_service.text.spool import DiskBudget, SpoolFactory
from dist_attn_service.text.tokenising import ThreadTokeniser
from dist_attn_service.uploads.service import FileService

__all__ = ["create_app", "stream_limits"]

FAREWELL_SECONDS = 3.0
ROUTERS = (completions, responses, encodings, texts, search, jobs, sessions, files, uploads, about)


class LifespanState(TypedDict):
    """The members of `request.state`."""

    services: Services


def create_app(
    settings: Settings, engines: Sequence[EnginePort] = (), log: Log | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The service for one model, or two; `engines` and `tracing` replace what the settings name in tests.

    Raises: ConfigError for keys that cannot be read; at start-up ModelFolderError for a folder that cannot be used.
    """
    log = log or make_log(level=settings.log_level, form=settings.log_format)
    metrics, keys = Metrics(), KeyRing.read(settings)
    tracing = tracing or Tracing.of(settings.tracing)
    open_requests = RequestLimit(settings.open_requests)
    ports = engines or _connections(settings, log)

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[LifespanState]:
        async with AsyncExitStack() as parts:
            threads = parts.enter_context(ThreadPoolExecutor(settings.threads, thread_name_prefix="work"))
            disk = parts.enter_context(ThreadPoolExecutor(1, thread_name_prefix="disk"))
            try:
                stores = await _open_stores(parts, settings, log)
                contexts = _contexts(settings, ports, stores.states.store, metrics, threads, log)
                chats = [await parts.enter_async_context(ChatService.opened(context)) for context in contexts]
            except (DistAttnError, ServiceError) as error:
                application.state.cannot_start = error
                raise
            services = _services(contexts, chats, stores, disk, open_requests)
            metrics.watch(services.gauges, version=__version__)
            await asyncio.gather(*(port.start() for port in ports))
            services.jobs.runner.start()
            parts.push_async_callback(stop_tasks, _look_at_sessions(stores, services))
            try:
                yield {"services": services}
            finally:
                await services.jobs.runner.stop()
                await asyncio.gather(*(served.prefixes.close() for served in services.models))
                await services.feeds.stop()
                await asyncio.gather(*(port.close() for port in ports))
                # requests that were cut off still write their last words and give their spools back
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
        exception_handlers=EXCEPTION_HANDLERS,
        responses={"default": PROBLEM_RESPONSE},
    )
    envelope = Envelope(
        log=log, metrics=metrics, refusal=keys.refusal, whereabouts=lambda: _whereabouts(ports), tracing=tracing
    )
    app.add_middleware(envelope.around)
    # for the server below the app, which sees broken requests and the end first
    app.state.refused = envelope.refused
    app.state.open_requests = open_requests
    app.state.cannot_start = None
    for family in ROUTERS:
        app.include_router(family.router)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    return app


class Stores(NamedTuple):
    """The stores that outlive this process: states, jobs and files."""

    states: StoreService
    jobs: JobCatalogue
    files: FileService


async def _open_stores(parts: AsyncExitStack, settings: Settings, log: Log) -> Stores:
    """Open the stores. Raises: DistAttnError, ServiceError for a folder whose contents cannot be used."""
    return Stores(
        await parts.enter_async_context(StoreService.opened(settings, log)),
        await parts.enter_async_context(JobCatalogue.opened(settings)),
        await parts.enter_async_context(FileService.opened(settings, log)),
    )


def _look_at_sessions(stores: "Stores", services: Services) -> asyncio.Task[None]:
    """Warn of sessions that cannot go on with the served models, beside everything else."""
    return asyncio.create_task(stores.states.warn_of_other_models(services.writer.watch))


def _connections(settings: Settings, log: Log) -> list[EnginePort]:
    """The connections to the controllers, which share one bound on what is kept of open requests to send it again.

    A model with one engine beside one with several has a part of its own: its work waits for no other engine.
    """
    limits = stream_limits(settings)
    models = [of_model.addresses for of_model in settings.of_models()]
    kinds = {len(addresses) > 1 for addresses in models}
    memories = {several: GivenMemory(limits.resend_bytes // len(kinds), several=several) for several in kinds}

    def port(address: str, memory: GivenMemory) -> ZmqEnginePort:
        return ZmqEnginePort(
            address,
            limits,
            log,
            status_seconds=settings.status_seconds,
            stale_seconds=settings.status_stale_seconds,
            keys=ClientKeys.find(settings.keys_dir, "api", address),
            memory=memory,
        )

    ports = [[port(address, memories[len(addresses) > 1]) for address in addresses] for addresses in models]
    return [EnginePool(of_model, log) if len(of_model) > 1 else of_model[0] for of_model in ports]


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


def _whereabouts(engines: Sequence[EnginePort]) -> dict[str, Any]:
    """Epoch and step of each engine, for the log."""
    found: dict[str, Any] = {}
    for prefix, engine in zip(("", "encoder_"), engines, strict=False):
        status = engine.health().status
        found |= {} if status is None else {f"{prefix}epoch": status.epoch, f"{prefix}step": status.step}
    return found


def _contexts(
    settings: Settings, engines: Sequence[EnginePort], store: StateStore, metrics: Metrics, threads: Executor, log: Log
) -> list[ServiceContext]:
    """Read the model folders; return for each model what all kinds of work with it share.

    Raises: ModelFolderError when a folder cannot be used, or two models would answer to one name or are told apart by
        nothing else.
    """
    contexts = []
    for of_model, engine in zip(settings.of_models(), engines, strict=True):
        model = ServedModel.read(of_model.model, of_model.served_model_name)
        found = fitted(load_tokeniser(of_model.model), of_model.model, model.vocab_size)
        tokeniser = ThreadTokeniser(found, threads, of_model.piece_bytes, model=model.id, log=log)
        watch = EngineWatch(engine, model, of_model, store.place)
        if isinstance(engine, EnginePool):
            engine.refusal = watch.refusal
        context = ServiceContext(of_model, model, engine, watch, tokeniser, store, Workload(), metrics, threads, log)
        contexts.append(context)
    twice = set(contexts[0].model.ids).intersection(*(other.model.ids for other in contexts[1:]))
    if len(contexts) > 1 and twice:
        raise ModelFolderError(
            f"both models answer to {min(twice)!r}; give one of them another name with encoder.served_model_name or "
            "http.served_model_name"
        )
    if len({context.model.identity for context in contexts}) < len(contexts):
        raise ModelFolderError(
            f"both models are {contexts[0].model.identity}: folders of one name with the same configuration and "
            "tokeniser, which jobs and sessions could not tell apart; rename one of the folders, or serve one model"
        )
    return contexts


def _services(
    contexts: Sequence[ServiceContext],
    chats: Sequence[ChatService],
    stores: Stores,
    disk: Executor,
    open_requests: RequestLimit,
) -> Services:
    """Put the parts together."""
    writer = contexts[0]
    settings = writer.settings
    folder = settings.data_dir / DataFolder.SPOOL
    make_private(folder)
    budget = DiskBudget(settings.disk_bytes)
    spools = SpoolFactory(folder, memory=settings.spool_memory_bytes, budget=budget, disk=disk)
    models = tuple(_model_services(context, chat, spools) for context, chat in zip(contexts, chats, strict=True))
    kept_jobs = JobServices(stores.jobs, [(served, served.completions) for served in models])
    return Services(
        models=models,
        searches=tuple(SearchService(served, served.embeddings, kept_jobs) for served in models),
        settings=settings,
        metrics=writer.metrics,
        threads=writer.threads,
        sessions=SessionServices(stores.states, writer),
        jobs=kept_jobs,
        open_requests=open_requests,
        json_memory=BodyMemory(settings.json_memory_bytes),
        search_memory=BodyMemory(settings.search_memory_bytes, "searched documents", "search fewer at once"),
        budget=budget,
        extraction=Extraction(folder, budget),
        files=stores.files,
        feeds=FeedingService(writer, stores.files),
    )


def _model_services(context: ServiceContext, chat: ChatService, spools: SpoolFactory) -> ModelServices:
    """Build the services of one model."""
    prefixes = PrefixCache(context)
    return ModelServices(
        **vars(context),
        completions=CompletionService(context, prefixes),
        prefixes=prefixes,
        chat=chat,
        documents=DocumentService(context, spools),
        embeddings=EmbeddingService(context),
        estimates=EstimateService(context),
    )
