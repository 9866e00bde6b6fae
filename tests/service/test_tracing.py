"""Spans: what a request, its wait and its work in the engine leave behind, and nothing where tracing is off."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from dist_attn_service.base.tracing import Tracing
from dist_attn_service.engine.port import OpenStreams
from dist_attn_service.engine.stream import StreamLimits
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dist_attn.errors import ConfigError
from dist_attn.settings import TracingSettings
from dist_attn.wire.messages import Generated
from tests.support.begun import begin_encoding
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import RunningService, running_service

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service whose spans stay in memory."""
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(), tracing=TRACING) as running:
        yield running


TRACING = Tracing(EXPORTER)


def spans(trace_id: str = TRACE) -> dict[str, Any]:
    """The spans of one trace by name, once all were exported."""
    TRACING.flush()
    found = [span for span in EXPORTER.get_finished_spans() if f"{span.context.trace_id:032x}" == trace_id]
    return {span.name: span for span in found}


def trace_of(service: RunningService, request_id: str) -> str:
    """The trace that a request's line of log names."""
    return str(service.logged(request_id)["trace_id"])


def test_a_request_is_a_child_of_its_traceparent(service: RunningService) -> None:
    """The spans of request, queue, session and epoch hang together below the caller's, named as the conventions say."""
    head = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "traced-1"}
    assert httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc"}, headers=head).status_code == 200
    assert trace_of(service, "traced-1") == TRACE
    found = spans()
    assert set(found) == {"POST /v1/completions", "engine.queue", "engine.session", "engine.epoch"}
    request, session = found["POST /v1/completions"], found["engine.session"]
    assert f"{request.parent.span_id:016x}" == CALLER and request.kind.name == "SERVER"
    assert request.attributes["http.route"] == "/v1/completions"
    assert request.attributes["http.request.method"] == "POST"
    assert request.attributes["http.response.status_code"] == 200 and request.status.is_ok
    assert found["engine.queue"].parent.span_id == session.parent.span_id == request.context.span_id
    assert found["engine.epoch"].parent.span_id == session.context.span_id
    assert session.attributes["gen_ai.usage.input_tokens"] == 3
    assert found["engine.queue"].end_time <= session.start_time <= session.end_time <= request.end_time
    assert request.resource.attributes["service.name"] == "dist-attn"


def test_what_fails_is_an_error_with_its_type(service: RunningService) -> None:
    """A refusal is the client's; what the engine does not do is an error of the span, by the code of the answer."""
    ids = {"traced-2": {"prompt": ""}, "traced-3": {"prompt": "abc"}}
    service.engine.fail_at = 1
    for request_id, body in ids.items():
        httpx.post(f"{service.url}/v1/completions", json=body, headers={"x-request-id": request_id})
    service.engine.fail_at = None
    refused, failed = (spans(trace_of(service, name))["POST /v1/completions"] for name in ids)
    assert refused.attributes["error.type"] == "empty_input" and refused.status.status_code.name == "UNSET"
    assert failed.attributes["error.type"] == "engine_failed" and failed.status.status_code.name == "ERROR"
    queue = spans(trace_of(service, "traced-3"))["engine.queue"]
    assert queue.attributes["error.type"] == "engine_failed"


def test_health_checks_leave_no_spans(service: RunningService) -> None:
    """They are asked every second, and would be most of all spans."""
    head = {"traceparent": f"00-{'ab' * 16}-{CALLER}-01"}
    for path in ("/livez", "/readyz", "/metrics"):
        httpx.get(service.url + path, headers=head)
    assert spans("ab" * 16) == {}


def test_every_group_of_ranks_has_a_span(service: RunningService) -> None:
    """Work that goes on with another epoch, or another controller, says so, with the steps that it was there for."""

    async def scenario() -> None:
        streams = OpenStreams(StreamLimits())
        streams.moved(4, 100)
        scope = {"path": "/x", "method": "GET", "scheme": "http", "http_version": "1.1"}
        with TRACING.request({**scope, "headers": [(b"traceparent", f"00-{'cd' * 16}-{CALLER}-01".encode())]}):
            stream = begin_encoding(streams, post=lambda message: None)
            stream.deliver(Generated(stream.request_id, [1]))
            streams.moved(4, 130)
            streams.moved(5, 131)
            assert stream.hold()
            streams.do_again()
            streams.moved(5, 150)
            stream.close()

    asyncio.run(scenario())
    TRACING.flush()
    found = [span for span in EXPORTER.get_finished_spans() if f"{span.context.trace_id:032x}" == "cd" * 16]
    steps = [
        tuple(span.attributes[f"dist_attn.{name}"] for name in ("epoch", "step.first", "step.last"))
        for span in found
        if span.name == "engine.epoch"
    ]
    assert steps == [(4, 100, 130), (5, 131, 150)]
    (session,) = [span for span in found if span.name == "engine.session"]
    assert [event.name for event in session.events] == ["controller lost", "another controller"]


@pytest.mark.slow
def test_nothing_is_imported_where_tracing_is_off() -> None:
    """A service without an endpoint loads neither the SDK nor an exporter; the interface alone comes with FastAPI."""
    program = (
        "import dist_attn_service.app, dist_attn_service.api_process, sys\n"
        "from dist_attn_service.base.tracing import Tracing, engine_trace\n"
        "with Tracing().request({'path': '/x'}): engine_trace('x').ended(0, '')\n"
        "print([n for n in sys.modules if n.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the packages are missing, the start says which extra to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otel\]'"):
        Tracing.of(TracingSettings(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert Tracing.of(TracingSettings()).close() is None
