"""The log: one line for every request that ends, with its reason and its sizes; JSON unless somebody is looking."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import httpx
import pytest
from dist_attn_service.base.logs import LibraryLogs, make_log
from dist_attn_service.base.tracing import Tracing
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.http.envelope import Envelope
from starlette.types import Message, Receive, Scope, Send

from tests.support.fake_engine import FakeEngine
from tests.support.opening import is_opening
from tests.support.raw_http import CHUNKED, TEXT, Answer, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service"), request_head_bytes=4000) as running:
        yield running


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Somebody is looking."""
        return True


def requests(service: RunningService) -> list[dict[str, Any]]:
    """The lines of requests so far, those of health checks left out."""
    return [line for line in service.log_lines() if line["event"] == "request" and line["level"] == "info"]


def test_exactly_one_line_per_request(service: RunningService) -> None:
    """Whatever becomes of a request, one line says so; what was no HTTP gets one too."""
    before = len(requests(service))
    url = service.url
    httpx.post(f"{url}/v1/completions", json={"prompt": "abc"})
    httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "stream": True})
    httpx.post(f"{url}/v1/completions", json={"prompt": ""})
    httpx.post(f"{url}/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    httpx.post(f"{url}/v1/encodings", content=b"abc")
    httpx.get(f"{url}/nothing")
    httpx.put(f"{url}/v1/models")
    for broken in (b"nonsense\r\n\r\n", b"GET /" + b"x" * 9000, head("/v1/encodings", TEXT, CHUNKED) + b"zz\r\n"):
        with service.connect() as connection:
            connection.sendall(broken)
            answer = Answer(connection)
            answer.read_head()
            answer.read_body()
    eventually(lambda: len(requests(service)) >= before + 10, "the lines")
    lines = requests(service)[before:]
    reasons = sorted(line["reason"] for line in lines)
    assert reasons == sorted(
        ["finished"] * 3
        + [
            "empty_input",
            "invalid_json",
            "not_found",
            "method_not_allowed",
            "bad_http",
            "head_too_large",
            "client_gone",
        ]
    )
    assert len({line["request_id"] for line in lines}) == 10


def test_what_is_polled_is_logged_for_debugging_alone(service: RunningService) -> None:
    """Answers of health checks, metrics, the page and its polls are logged at debug; those that failed at info."""
    polled = ["/", "/page/app.js", "/health", "/livez", "/readyz", "/metrics", "/v1/status"]
    for number, path in enumerate(polled):
        httpx.get(service.url + path, headers={"x-request-id": f"polled-{number}"})
    levels = [service.logged(f"polled-{number}")["level"] for number in range(len(polled))]
    assert levels == ["debug"] * len(polled)
    httpx.delete(f"{service.url}/v1/status", headers={"x-request-id": "not-a-poll"})
    assert service.logged("not-a-poll")["level"] == "info"


def test_a_line_has_sizes_and_the_engines_step(service: RunningService) -> None:
    """Bytes in and out, tokens, and where the engine was, for every kind of request."""
    document, prompt = b"abcdefgh" * 100, {"prompt": "abc", "max_tokens": 4}
    httpx.post(f"{service.url}/v1/encodings", content=document, headers={"x-request-id": "size-1"})
    answer = httpx.post(f"{service.url}/v1/completions", json=prompt, headers={"x-request-id": "size-2"})
    httpx.post(f"{service.url}/v1/embeddings", json={"input": ["ab", "c"]}, headers={"x-request-id": "size-3"})
    encoding, completion, embedding = (service.logged(f"size-{n}") for n in (1, 2, 3))
    assert (encoding["request_bytes"], encoding["tokens"], encoding["rows"]) == (800, 800, 2)
    assert completion["response_bytes"] == len(answer.content)
    assert (completion["prompt_tokens"], completion["completion_tokens"], completion["choices"]) == (3, 4, 1)
    assert (embedding["tokens"], embedding["inputs"]) == (3, 2)
    for line in (encoding, completion, embedding):
        assert (line["epoch"], line["step"], line["status"], line["reason"]) == (1, 1, 200, "finished")


def test_the_engine_knows_a_request_by_its_id(service: RunningService) -> None:
    """What the controller logs about a request begins with the id that the client has."""
    service.engine.received.clear()
    headers = {"x-request-id": "mine"}
    httpx.post(f"{service.url}/v1/encodings", content=b"abc", headers=headers)
    httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc", "n": 2}, headers=headers)
    httpx.post(f"{service.url}/v1/embeddings", json={"input": "abc"}, headers=headers)
    names = [m.request_id for m in service.engine.received if is_opening(m)]
    assert len(set(names)) == 4 and all(name.startswith("mine.") for name in names)


def test_a_document_that_breaks_off_tells_how_far_it_came(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A request that fails has its sizes as well."""
    engine = FakeEngine(fail_at=500, credit=100)
    with running_service(tmp_path_factory.mktemp("service"), engine) as service:
        httpx.post(f"{service.url}/v1/encodings", content=b"x" * 1000, headers={"x-request-id": "broke"})
        line = service.logged("broke")
        assert (line["reason"], line["request_bytes"], line["tokens"]) == ("engine_failed", 1000, 1000)


def test_bytes_that_are_tried_twice_are_counted_once() -> None:
    """A piece of the answer that a slow client kept waiting, and that is sent again, counts as sent once."""
    stream = StringIO()
    stalls = [True, False, False]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with pytest.raises(TimeoutError):
            await send({"type": "http.response.body", "body": b"four", "more_body": True})
        await send({"type": "http.response.body", "body": b"four", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and stalls.pop(0):
            raise TimeoutError

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    parts = {"log": make_log(stream), "metrics": Metrics(), "tracing": Tracing()}
    envelope = Envelope(**parts, refusal=lambda _: None, whereabouts=dict)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(envelope.around(app)(scope, receive, send))
    assert json.loads(stream.getvalue())["response_bytes"] == 4


def test_a_terminal_gets_lines_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON goes to files and pipes, words to a terminal, without colours under NO_COLOR; either may be asked for."""
    file, terminal = StringIO(), Terminal()
    make_log(file).info("started", port=1)
    assert json.loads(file.getvalue())["port"] == 1
    monkeypatch.setenv("NO_COLOR", "1")
    make_log(terminal).info("started", port=1)
    assert "started" in terminal.getvalue() and "port=1" in terminal.getvalue()
    assert "{" not in terminal.getvalue() and "\x1b" not in terminal.getvalue()
    plain, forced = StringIO(), Terminal()
    make_log(plain, form="plain").info("started", port=1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info\] started port=1\n", plain.getvalue())
    make_log(forced, form="json").info("started", port=1)
    assert json.loads(forced.getvalue())["port"] == 1


def test_the_level_is_kept() -> None:
    """What is below the level is not written."""
    stream = StringIO()
    log = make_log(stream, "warning")
    log.info("quiet")
    log.warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_libraries_log_in_the_same_form() -> None:
    """What a library logs is a line like ours, with its name and its traceback."""
    stream = StringIO()
    logger = logging.Logger("library")
    logger.addHandler(LibraryLogs(make_log(stream)))
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("it %s", "failed")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["level"]) == ("it failed", "library", "error")
    assert "RuntimeError: broken" in line["exception"]
