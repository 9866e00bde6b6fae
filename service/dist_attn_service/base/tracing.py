"""Spans of OpenTelemetry: of a request, of its wait for the engine, and of the engine's work on it.

Off unless there is a place to send them to, and then nothing of OpenTelemetry is imported here. Names are those of the
semantic conventions (HTTP server spans, generative AI) where there are any, and `dist_attn.…` where there are none:

    POST /v1/completions                      the caller's `traceparent` above it, if there was one
      engine.queue                            until the engine has answered something
      engine.session                          until the end of the work
        engine.epoch                          one for each group of ranks that works on it: its first and last step
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

from starlette.datastructures import Headers
from starlette.types import Scope

from dist_attn import __version__
from dist_attn.errors import ConfigError, extra_hint
from dist_attn.settings import TracingSettings

__all__ = ["EngineTrace", "RequestTrace", "Tracing", "engine_trace"]

NAME = "dist-attn"
FAILED = 500
UNTRACED = frozenset({"/health", "/livez", "/readyz", "/metrics"})


class RequestTrace:
    """The trace of one request; this base class records nothing."""

    trace_id = ""

    def ended(self, route: str, status: int, reason: str) -> None:
        """Note that the answer has ended, or broken off, for a reason from the closed set of the log."""


class EngineTrace:
    """The trace of one piece of work in the engine; this base class records nothing."""

    def worked(self) -> None:
        """Note that the engine has answered something."""

    def moved(self, epoch: int, step: int) -> None:
        """Note the epoch and step that the engine has reached."""

    def told(self, event: str) -> None:
        """Mark an event in time."""

    def ended(self, tokens: int, error: str) -> None:
        """Note that the work is over, after so many tokens were sent for it; `error` is its code, or ""."""


_ACTIVE: ContextVar["Tracing | None"] = ContextVar("tracing", default=None)


def engine_trace(work: str) -> EngineTrace:
    """The trace of work in the engine for the request that this is called for."""
    tracing = _ACTIVE.get()
    return EngineTrace() if tracing is None else tracing.engine(work)


class Tracing:
    """The spans of one process, which `exporter` takes; with None nothing is recorded.

    Raises: ConfigError where OpenTelemetry is needed and not installed.
    """

    def __init__(self, exporter: Any = None, *, sample: float = 1.0) -> None:
        self._provider: Any = None
        if exporter is None:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError:
            raise _not_installed() from None
        resource = Resource.create({"service.name": NAME, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(sample)))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(NAME, __version__)

    @classmethod
    def of(cls, settings: TracingSettings) -> Self:
        """The tracing that the settings ask for.

        Raises: ConfigError where OpenTelemetry is needed and not installed.
        """
        if not settings.endpoint:
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise _not_installed() from None
        return cls(OTLPSpanExporter(endpoint=settings.endpoint), sample=settings.sample)

    @contextmanager
    def request(self, scope: Scope) -> Iterator[RequestTrace]:
        """The span of a request, current within the block; a child of its `traceparent`."""
        if self._provider is None or scope["path"] in UNTRACED:
            yield RequestTrace()
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = Headers(scope=scope)
        above = TraceContextTextMapPropagator().extract(headers)
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"][:500],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "user_agent.original": headers.get("user-agent", "")[:200],
        }
        span = self._tracer.start_span(
            scope["method"], context=above, kind=trace.SpanKind.SERVER, attributes=attributes
        )
        token = _ACTIVE.set(self)
        try:
            with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
                yield _RequestSpan(span, scope["method"])
        finally:
            _ACTIVE.reset(token)

    def engine(self, work: str) -> EngineTrace:
        """The spans of work in the engine, below the current one."""
        return _EngineSpans(self._tracer, work)

    def flush(self) -> None:
        """Send what is there; may take some seconds."""
        if self._provider is not None:
            self._provider.force_flush()

    def close(self) -> None:
        """Send what is left, the last thing; may take some seconds."""
        if self._provider is not None:
            self._provider.shutdown()


class _RequestSpan(RequestTrace):
    def __init__(self, span: Any, method: str) -> None:
        self._span, self._method = span, method
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def ended(self, route: str, status: int, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "dist_attn.reason": reason})
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if reason != "finished":
            self._span.set_attribute("error.type", reason)
        if status >= FAILED or (status < 300 and reason not in ("finished", "client_gone")):
            self._span.set_status(StatusCode.ERROR, reason)


class _EngineSpans(EngineTrace):
    def __init__(self, tracer: Any, work: str) -> None:
        from opentelemetry import context

        self._tracer, self._above = tracer, context.get_current()
        self._attributes = {"dist_attn.work": work}
        self._queue = tracer.start_span("engine.queue", context=self._above, attributes=self._attributes)
        self._session: Any = None
        self._group: Any = None
        self._epoch, self._step = 0, 0

    def worked(self) -> None:
        if self._session is None:
            self._queue.end()
            self._session = self._tracer.start_span("engine.session", context=self._above, attributes=self._attributes)
            self._enter()

    def moved(self, epoch: int, step: int) -> None:
        if epoch != self._epoch:
            self._leave()
            self._epoch, self._step = epoch, step
            if self._session is not None:
                self._enter()
        self._step = step

    def told(self, event: str) -> None:
        (self._session or self._queue).add_event(event)

    def ended(self, tokens: int, error: str) -> None:
        from opentelemetry.trace import StatusCode

        self._leave()
        last = self._session or self._queue
        last.set_attribute("gen_ai.usage.input_tokens", tokens)
        if error:
            last.set_attribute("error.type", error)
            last.set_status(StatusCode.ERROR, error)
        last.end()

    def _enter(self) -> None:
        from opentelemetry.trace import set_span_in_context

        self._group = self._tracer.start_span(
            "engine.epoch",
            context=set_span_in_context(self._session, self._above),
            attributes={"dist_attn.epoch": self._epoch, "dist_attn.step.first": self._step},
        )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.set_attribute("dist_attn.step.last", self._step)
            self._group.end()
            self._group = None


def _not_installed() -> ConfigError:
    return ConfigError(f"tracing.endpoint is set, but OpenTelemetry is not installed: {extra_hint('otel')}")
