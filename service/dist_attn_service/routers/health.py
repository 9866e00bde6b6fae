"""Is the process alive, can the engine take work, what are both doing."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn import __version__
from dist_attn_service.base.errors import DRAINING, ServiceStopping
from dist_attn_service.dependencies import services_of
from dist_attn_service.schemas.completions import RankState, Readiness, ServiceState, Version

__all__ = ["router"]

router = APIRouter(tags=["health"])


@router.get("/health", include_in_schema=False)  # where other servers of models have it
@router.get("/livez", summary="The process answers")
async def livez() -> dict[str, bool]:
    """Alive means no more than that the event loop answers."""
    return {"alive": True}


@router.get("/readyz", response_model=Readiness, summary="The engine can take work")
async def readyz(request: Request) -> Response:
    """200 when the engine is ready, otherwise 503 with the reason; 503 too once the service stops."""
    services = services_of(request)
    if services.open_requests.closed:
        raise ServiceStopping
    status = services.watch.ready_status()
    ready = Readiness(
        model=services.model.id,
        backend=status.backend,
        ranks=len(status.ranks),
        active=status.active,
        queued=status.queued,
    )
    return Response(ready.model_dump_json(), media_type="application/json")


@router.get("/version", summary="The version of this program")
async def version() -> Version:
    """The version, as `dist-attn` has it."""
    return Version(version=__version__)


@router.get("/v1/status", summary="What service and engine are doing")
async def status(request: Request) -> ServiceState:
    """Ranks, queue, sessions, speed; 200 also while the engine is not ready."""
    services = services_of(request)
    health, stored = services.watch.health(), await services.sessions.stored.totals()
    stopping = services.open_requests.closed
    own = {
        "ready": health.ready and not stopping,
        "reason": DRAINING if stopping else "ready" if health.ready else health.reason,
        "version": __version__,
        "model": services.model.id,
        "uptime_seconds": round(time.monotonic() - services.started, 1),
        "open_requests": services.open_requests.count,
        "waiting_requests": services.watch.waiting,
        "spool_bytes": services.budget.used,
        "stored_sessions": stored.sessions,
        "stored_states": stored.snapshots,
        "stored_bytes": stored.bytes,
    }
    engine = health.status
    if engine is None:
        return ServiceState.model_validate(own)
    ranks = [
        RankState(
            rank=rank.rank,
            pid=rank.pid,
            phase=rank.phase,
            step=rank.step_done,
            heartbeat_age_seconds=round(rank.heartbeat_age + health.age, 3),
            progress_age_seconds=round(rank.progress_age + health.age, 3),
            peak_rss_bytes=rank.peak_rss_bytes,
            busy_seconds=round(rank.busy, 3),
        )
        for rank in engine.ranks
    ]
    names = ("backend", "epoch", "step", "queued", "tokens_per_second", "lost_groups", "replayed_tokens")
    theirs = {name: getattr(engine, name) for name in names}
    return ServiceState.model_validate({**own, **theirs, "sessions": engine.active, "ranks": ranks})


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counters and gauges in Prometheus' text format, or in OpenMetrics when that is asked for."""
    services = services_of(request)
    await services.sessions.stored.totals()  # so that the gauges tell of this moment
    text, media_type = services.metrics.render(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})
