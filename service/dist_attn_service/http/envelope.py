"""The envelope of every answer: a request id, a problem document when something failed, one line of log."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dist_attn_service.base.errors import PROBLEM_JSON, ClientGone, Code, ServiceError, ServiceStopping, UnforeseenError
from dist_attn_service.base.logs import Log, RequestRecord
from dist_attn_service.base.tracing import RequestTrace, Tracing
from dist_attn_service.engine.metrics import UNROUTED, Metrics
from dist_attn_service.http.pages import PAGE_FILES

__all__ = ["EXCEPTION_HANDLERS", "Envelope"]

POLLED = frozenset({"/health", "/livez", "/readyz", "/metrics", "/v1/status", *PAGE_FILES})
"""The paths that probes and the page ask for every second."""
CLIENT_GONE = 499  # as nginx writes it


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The middleware around the whole app; never touches `receive`.

    `refusal` gives the error for a request that may not pass, `whereabouts` the engine's epoch and step for the log.
    """

    log: Log
    metrics: Metrics
    refusal: Callable[[Scope], ServiceError | None]
    whereabouts: Callable[[], dict[str, Any]]
    tracing: Tracing

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app inside the envelope, as an ASGI middleware."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                with self.tracing.request(scope) as trace:
                    await self._answer(app, scope, receive, send, trace)
            else:
                await app(scope, receive, send)

        return wrapped

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, trace: RequestTrace) -> None:
        """Run the app, and answer where it raised instead."""
        record = RequestRecord(
            request_id=RequestRecord.pick_id(Headers(scope=scope).get("x-request-id")),
            method=scope["method"],
            path=scope["path"],
            log=self.log,
            address=(scope.get("client") or ("",))[0],
        )
        scope.setdefault("state", {})["record"] = record
        if trace.trace_id:
            record.note(trace_id=trace.trace_id)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)
            # Only now: a writer gives up a `send` that a slow client keeps waiting, and tries the same bytes again.
            record.sent += len(message.get("body", b""))

        try:
            refusal = self.refusal(scope)
            inner = app if refusal is None else _problem_response(refusal, record)
            await inner(scope, receive, marked)
        except asyncio.CancelledError:
            # the server stops, and this request's task ends here in any case
            record.reason = str(Code.STOPPING)
            if not record.status:
                await _problem_response(ServiceStopping(), record)(scope, receive, marked)
        except Exception as error:
            record.unexpected(error)
            if not record.status:
                await _problem_response(UnforeseenError(), record)(scope, receive, marked)
        finally:
            for give_back in record.at_end:
                give_back()
            route = getattr(scope.get("route"), "path_format", UNROUTED)
            trace.ended(route, record.status, record.reason)
            self._write(record, route)

    def refused(self, error: ServiceError, request_id: str) -> None:
        """Log and count a refused message that was no HTTP request, and that the app has therefore not seen."""
        record = RequestRecord(request_id, method="", path="", log=self.log, reason=str(error.code))
        record.status = error.status
        self._write(record, UNROUTED)

    def _write(self, record: RequestRecord, route: str) -> None:
        with contextlib.suppress(Exception):  # the line is written whatever is wrong with the connection to the engine
            record.note(**self.whereabouts())
        record.write(polled=record.path in POLLED)
        self.metrics.ended(route, record.reason, record.seconds, received=record.received(), sent=record.sent)


def _problem_response(error: ServiceError, record: RequestRecord) -> Response:
    """The answer to an error before the head was sent."""
    record.reason = str(error.code)
    return Response(
        error.body(record.request_id), status_code=error.status, headers=error.headers, media_type=PROBLEM_JSON
    )


async def _nobody_to_answer(request: Request, error: Any) -> Response:
    """Answer a client that left before its answer began. Nobody gets this one; the log has its status."""
    request.state.record.reason = "client_gone"
    return Response(status_code=CLIENT_GONE)


async def _service_problem(request: Request, error: Any) -> Response:
    """Answer an error of the service's own tree."""
    return _problem_response(error, request.state.record)


async def _routing_problem(request: Request, error: Any) -> Response:
    """Answer a refusal of the router: an unknown path, a wrong method."""
    status, words = error.status_code, str(error.detail)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    where = f"{request.method} {request.url.path[:200]}"
    code = Code.INVALID_VALUE if status < 500 else Code.INTERNAL_ERROR
    if status == 404:
        words, code = f"there is no {where}; see /docs", Code.NOT_FOUND
    elif status == 405:
        # Starlette names the methods of the first route of this path alone.
        headers["allow"] = allowed = ", ".join(_methods_here(request))
        words, code = f"{where} is not offered; use {allowed}", Code.METHOD_NOT_ALLOWED
    failure = ServiceError(words, code=code, status=status, headers=headers)
    return _problem_response(failure, request.state.record)


def _methods_here(request: Request) -> list[str]:
    """The methods that the request's path is offered with, by all routes together."""
    methods: set[str] = set()
    pending = list(request.app.routes)
    while pending:
        route = pending.pop()
        # newer versions of FastAPI keep the routes of an included router in it
        pending += getattr(getattr(route, "original_router", None), "routes", [])
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


EXCEPTION_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ServiceError: _service_problem,
    HTTPException: _routing_problem,
    ClientGone: _nobody_to_answer,
}
"""The exceptions that routes and the router raise before an answer has begun, and the functions that answer them."""
