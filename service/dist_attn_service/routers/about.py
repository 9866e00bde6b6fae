"""What there is and how it is: models, health, version, metrics, the description of the API, and the web page."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn import __version__
from dist_attn.wire.messages import RankStatus
from dist_attn_api.types import Model, ModelList, Rank, Readiness, Status, Version
from dist_attn_service.base.errors import DRAINING, Code, NotFound, ServiceStopping
from dist_attn_service.dependencies import Services, services_of
from dist_attn_service.http.pages import PAGE_FILES, PAGE_HEADERS, render_reference

router = APIRouter()
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
}


@router.get("/v1/models", tags=["models"], summary="List the models")
async def list_models(request: Request) -> ModelList:
    """The model of this service under each of its names."""
    services = services_of(request)
    return ModelList(data=[_card(services, name) for name in services.model.ids])


@router.get("/v1/models/{model_id:path}", tags=["models"], summary="One model")
async def get_model(request: Request, model_id: str) -> Model:
    """The model of that name; 404 for any other."""
    services = services_of(request)
    services.check_model(model_id)
    return _card(services, model_id)


def _card(services: Services, name: str) -> Model:
    model, status = services.model, services.watch.health().status
    chat = ["chat/completions"] if services.chat.offered and "completions" in model.capabilities else []
    return Model(
        id=name,
        created=model.created,
        capabilities=[*model.capabilities, *chat],
        embedding_size=model.hidden_size,
        max_model_len=model.max_tokens,
        num_layers=model.num_layers,
        state_token_bytes=None if status is None or status.state_bytes is None else status.token_bytes,
    )


@router.get("/health", include_in_schema=False)  # where other servers of models have it
@router.get("/livez", tags=["health"], summary="The process answers")
async def livez() -> dict[str, bool]:
    """Alive means no more than that the event loop answers."""
    return {"alive": True}


@router.get("/readyz", tags=["health"], summary="The engine can take work")
async def readyz(request: Request) -> Readiness:
    """200 when the engine is ready, otherwise 503 with the reason; 503 too once the service stops."""
    services = services_of(request)
    if services.open_requests.closed:
        raise ServiceStopping
    status = services.watch.ready_status()
    return Readiness(
        model=services.model.id,
        backend=status.backend,
        ranks=len(status.ranks),
        active=status.active,
        queued=status.queued,
    )


@router.get("/version", tags=["health"], summary="The version of this program")
async def version() -> Version:
    """The version, as `dist-attn` has it."""
    return Version(version=__version__)


@router.get("/v1/status", tags=["health"], summary="What service and engine are doing")
async def status(request: Request) -> Status:
    """Ranks, queue, sessions, speed; 200 also while the engine is not ready."""
    services = services_of(request)
    health, stored = services.watch.health(), await services.sessions.stored.totals()
    stopping, engine = services.open_requests.closed, health.status
    names = ("backend", "epoch", "step", "queued", "tokens_per_second", "lost_groups", "replayed_tokens")
    return Status(
        ready=health.ready and not stopping,
        reason=DRAINING if stopping else "ready" if health.ready else health.reason,
        version=__version__,
        model=services.model.id,
        uptime_seconds=round(time.monotonic() - services.started, 1),
        open_requests=services.open_requests.count,
        waiting_requests=services.watch.waiting,
        spool_bytes=services.budget.used,
        stored_sessions=stored.sessions,
        stored_states=stored.snapshots,
        stored_bytes=stored.bytes,
        sessions=None if engine is None else engine.active,
        ranks=[] if engine is None else [_rank(rank, health.age) for rank in engine.ranks],
        **({} if engine is None else {name: getattr(engine, name) for name in names}),
    )


def _rank(rank: RankStatus, age: float) -> Rank:
    """A rank as the controller said that it was, `age` seconds ago."""
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
async def metrics(request: Request) -> Response:
    """Counters and gauges in Prometheus' text format, or in OpenMetrics when that is asked for."""
    services = services_of(request)
    await services.sessions.stored.totals()  # so that the gauges tell of this moment
    text, media_type = services.metrics.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})


# ---- for people ----------------------------------------------------------------------------------


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The API's description as one page without scripts; /openapi.json has the same for programs."""
    page = render_reference(request.app.openapi())
    return Response(page, media_type="text/html; charset=utf-8", headers=DOCS_HEADERS)


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page."""
    return _page_file(request)


@router.get("/page/{name:path}", include_in_schema=False)
async def part(request: Request, name: str) -> Response:
    """A style or a script of it."""
    return _page_file(request)


def _page_file(request: Request) -> Response:
    """The file at exactly this address.

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
