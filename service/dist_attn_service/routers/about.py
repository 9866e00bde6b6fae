"""The routes about the service itself: models, health, version, metrics, the description of the API, the web page."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn import __version__
from dist_attn.wire.messages import RankStatus
from dist_attn_api.types import EngineStatus, Model, ModelList, Rank, Readiness, Status, Version
from dist_attn_service.base.errors import DRAINING, Code, NotFound, ServiceStopping
from dist_attn_service.dependencies import ModelServices
from dist_attn_service.engine.port import EngineHealth
from dist_attn_service.http.pages import PAGE_FILES, PAGE_HEADERS, render_reference
from dist_attn_service.routers.incoming import Asked

router = APIRouter()
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}


@router.get("/v1/models", tags=["models"], summary="List the models")
async def list_models(asked: Asked) -> ModelList:
    """The models of this service, each under each of its names; the one that draws text comes first."""
    models = asked.services.models
    return ModelList(data=[_card(served, name) for served in models for name in served.model.ids])


@router.get("/v1/models/{model_id:path}", tags=["models"], summary="One model")
async def get_model(asked: Asked, model_id: str) -> Model:
    """The model of that name; 404 for any other."""
    return _card(asked.services.context_for(model_id), model_id)


def _card(served: ModelServices, name: str) -> Model:
    model, status = served.model, served.watch.health().status
    chat = ["chat/completions"] if served.chat.offered and "completions" in model.capabilities else []
    manifest = None if status is None else status.manifest
    return Model(
        id=name,
        created=model.created,
        capabilities=[*model.capabilities, *chat],
        embedding_size=model.hidden_size,
        max_model_len=model.max_tokens,
        num_layers=model.num_layers,
        state_token_bytes=None if status is None or status.state_bytes is None else status.token_bytes,
        revision=None if manifest is None else manifest.model.revision,
    )


@router.get("/health", include_in_schema=False)  # the path that other servers of models use
@router.get("/livez", tags=["health"], summary="The process answers")
async def livez() -> dict[str, bool]:
    """Answer as long as the event loop does; that says nothing of the engine."""
    return {"alive": True}


@router.get("/readyz", tags=["health"], summary="The engine can take work")
async def readyz(asked: Asked) -> Readiness:
    """Answer 200 when every engine is ready, otherwise 503 with the reason; 503 too once the service stops."""
    services = asked.services
    if services.open_requests.stopping:
        raise ServiceStopping
    readiness = None
    for served in reversed(services.models):  # the encoder's stands inside the first model's
        status = served.watch.ready_status()
        readiness = Readiness(
            model=served.model.id,
            backend=status.backend,
            ranks=len(status.ranks),
            active=status.active,
            queued=status.queued,
            encoder=readiness,
        )
    assert readiness is not None
    return readiness


@router.get("/version", tags=["health"], summary="The version of this program")
async def version() -> Version:
    """The version of the installed package."""
    return Version(version=__version__)


@router.get("/v1/status", tags=["health"], summary="What service and engine are doing")
async def status(asked: Asked) -> Status:
    """The ranks, the queue, the sessions and the speed; 200 also while an engine is not ready."""
    services = asked.services
    stored, stopping = await services.sessions.stored.totals(), services.open_requests.stopping
    writer, *others = (_engine(served, served.watch.health()) for served in services.models)
    lacking = [engine for engine in (writer, *others) if not engine["ready"]]
    reason = DRAINING if stopping else "ready"
    if lacking and not stopping:
        reason = f"{lacking[0]['model']}: {lacking[0]['reason']}" if others else lacking[0]["reason"]
    return Status(
        **{**writer, "ready": not stopping and not lacking, "reason": reason},
        version=__version__,
        uptime_seconds=round(time.monotonic() - services.started, 1),
        open_requests=services.open_requests.count,
        waiting_requests=services.waiting,
        spool_bytes=services.budget.used,
        stored_sessions=stored.sessions,
        stored_states=stored.snapshots,
        stored_bytes=stored.bytes,
        encoder=EngineStatus(**others[0]) if others else None,
        engines=[
            EngineStatus(**_engine(served, health), address=address)
            for served in services.models
            for address, health in served.engine.engines().items()
        ],
    )


def _engine(served: ModelServices, health: EngineHealth) -> dict[str, Any]:
    """The members of an `EngineStatus`."""
    facts = {"model": served.model.id, "ready": health.ready, "reason": health.reason or "ready"}
    engine = health.status
    if engine is None:
        return facts
    names = ("backend", "epoch", "step", "queued", "tokens_per_second", "lost_groups", "replayed_tokens")
    figures = {name: getattr(engine, name) for name in names}
    return {**facts, **figures, "sessions": engine.active, "ranks": [_rank(rank, health.age) for rank in engine.ranks]}


def _rank(rank: RankStatus, age: float) -> Rank:
    """A rank by the controller's status, which is `age` seconds old."""
    return Rank(
        rank=rank.rank,
        pid=rank.pid,
        phase=rank.phase,
        step=rank.step_done,
        heartbeat_age_seconds=round(rank.heartbeat_age + age, 3),
        progress_age_seconds=round(rank.progress_age + age, 3),
        peak_rss_bytes=rank.peak_rss_bytes,
        busy_seconds=round(rank.busy, 3),
        device=rank.device,
    )


@router.get("/metrics", tags=["health"], summary="Metrics for Prometheus", response_class=Response)
async def metrics(asked: Asked) -> Response:
    """Counters and gauges in Prometheus' text format, or in OpenMetrics when that is asked for."""
    services = asked.services
    await services.sessions.stored.totals()  # so that the gauges are those of this moment
    text, media_type = services.metrics.render(asked.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})


# ---- for people ----------------------------------------------------------------------------------


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The API's description as one page without scripts; /openapi.json has the same for programs."""
    page = render_reference(request.app.openapi())
    return Response(page, media_type="text/html; charset=utf-8", headers=DOCS_HEADERS)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/page/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def page_file(request: Request) -> Response:
    """The page, or a style or a script of it: the file at exactly this address.

    Raises: NotFound.
    """
    file = PAGE_FILES.get(request.scope["path"])
    if file is None:
        raise NotFound("the page has no such file; it begins at /", code=Code.NOT_FOUND)
    headers = {**PAGE_HEADERS, "etag": file.etag}
    tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in tags:
        return Response(status_code=304, headers=headers)
    return Response(file.data, media_type=file.media_type, headers=headers)
