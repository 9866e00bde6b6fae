"""What a connection may do besides one request after the other: pipelines, old versions, upgrades, half an end."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.raw_http import CHUNKED, LAST_CHUNK, TEXT, Answer, chunk, head, lines_of
from tests.support.service_server import RunningService, eventually, running_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service that is soon tired of heads that do not end."""
    with running_service(tmp_path_factory.mktemp("service"), request_head_seconds=0.5) as running:
        yield running


def completion(request_id: str, *headers: str, version: str = "1.1", **body: object) -> bytes:
    """The bytes of a request for a completion."""
    data = json.dumps({"prompt": "ab", "max_tokens": 4, **body}).encode()
    first = head("/v1/completions", f"x-request-id: {request_id}", *headers, f"Content-Length: {len(data)}")
    return first.replace(b"HTTP/1.1", f"HTTP/{version}".encode()) + data


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_its_pipeline(tmp_path: Path, stream: bool) -> None:
    """The request that is answered just then is cancelled, though another came behind it, which never begins."""
    engine = FakeEngine(draw_seconds=0.02)
    with running_service(tmp_path, engine) as service:
        with service.connect() as connection:
            long = completion("pipe-1", max_tokens=60_000, stream=stream)
            connection.sendall(long + completion("pipe-2", stream=stream))
            eventually(lambda: len(engine.received) > 1, "the first request to reach the engine")
        assert service.logged("pipe-1")["reason"] == "client_gone"
        eventually(lambda: len(engine.cancelled) == 1, "the cancel")
        assert not [line for line in service.log_lines() if line.get("request_id") == "pipe-2"]
        assert not [line for line in service.log_lines() if line["event"] == "unexpected error"]


def test_nonsense_behind_a_pipeline_ends_the_answer_that_runs(tmp_path: Path) -> None:
    """The stream that is written just then gets its last words, and nothing of another answer gets into it."""
    engine = FakeEngine(draw_seconds=0.02)
    with running_service(tmp_path, engine) as service, service.connect() as connection:
        connection.sendall(completion("first", max_tokens=60_000, stream=True))
        answer = Answer(connection)
        assert answer.read_head() == 200 and answer.read_chunk()
        connection.sendall(completion("second") + b"\x00nonsense\r\n\r\n")
        body = answer.read_body()
        assert b'"bad_http"' in body and body.endswith(b"data: [DONE]\n\n") and b"HTTP/1.1 " not in body
        assert answer.at_end()
        assert service.logged("first")["reason"] == "client_gone"


@pytest.mark.parametrize("rest", ["a blank line", "a body that was not wanted"])
def test_a_connection_is_not_held_by_a_few_bytes(service: RunningService, rest: str) -> None:
    """After an answer neither an empty line nor the slow rest of a refused body keeps the connection open."""
    with service.connect() as connection:
        blank = rest == "a blank line"
        connection.sendall(head("/livez", method="GET") if blank else head("/nothing", "Content-Length: 100"))
        answer = Answer(connection)
        assert answer.read_head() == (200 if blank else 404)
        answer.read_body()
        connection.sendall(b"\r\n")
        if blank:
            assert answer.read_head() == 408
            answer.read_body()
        assert answer.at_end()


def test_an_old_client_gets_no_chunks(service: RunningService) -> None:
    """To HTTP/1.0 a streamed body is sent as it is and ends with the connection; a whole one has its length."""
    with service.connect() as connection:
        old = head("/v1/encodings", TEXT, "Content-Length: 5").replace(b"HTTP/1.1", b"HTTP/1.0")
        connection.sendall(old + b"hello")
        answer = Answer(connection)
        assert answer.read_head() == 200 and "transfer-encoding" not in answer.headers
        assert lines_of(answer.read_rest())[-1]["object"] == "encoding.summary"
    with service.connect() as connection:
        connection.sendall(completion("old", version="1.0", stream=True))
        answer = Answer(connection)
        assert answer.read_head() == 200
        assert answer.read_rest().endswith(b"data: [DONE]\n\n")
    with service.connect() as connection:
        connection.sendall(completion("old", version="1.0"))
        answer = Answer(connection)
        assert answer.read_head() == 200 and answer.headers["connection"] == "close"
        assert json.loads(answer.read_body())["object"] == "text_completion"
        assert answer.at_end()


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_offer_to_upgrade_is_ignored(service: RunningService, step: int) -> None:
    """Some clients offer HTTP/2 with their first request: its body counts, wherever the bytes are cut."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "Upgrade-Not: x", "HTTP2-Settings: AAMAAABk")
    with service.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = completion("up", *offer) + head("/livez", *offer, method="GET")
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        answer = Answer(connection)
        assert answer.read_head() == 200
        assert json.loads(answer.read_body())["choices"][0]["text"] == "abab"
        assert answer.read_head() == 200 and answer.headers["x-request-id"].startswith("req-")
        assert answer.read_body() == b'{"alive":true}'


@pytest.mark.parametrize("half", [b"POST /v1/comp", head("/v1/encodings", TEXT, "Content-Length: 50") + b"hello"])
def test_half_a_request_is_told(service: RunningService, half: bytes) -> None:
    """A client that ends its side in the middle of a head or a body hears that it broke off."""
    with service.connect() as connection:
        connection.sendall(half)
        connection.shutdown(socket.SHUT_WR)
        answer = Answer(connection)
        assert answer.read_head() in (200, 400)  # 200 once the answer had begun
        assert b'"bad_http"' in answer.read_body()
        assert answer.at_end()


def test_a_document_that_breaks_off_is_told_in_its_answer(service: RunningService) -> None:
    """Rows have gone out already: the last line says what happened."""
    with service.connect() as connection:
        connection.sendall(head("/v1/encodings?granularity=token", TEXT, CHUNKED) + chunk(b"hello"))
        answer = Answer(connection)
        assert answer.read_head() == 200
        connection.shutdown(socket.SHUT_WR)
        assert lines_of(answer.read_body())[-1]["error"]["code"] == "bad_http"
        assert answer.at_end()


def test_a_long_path_is_a_long_head(service: RunningService) -> None:
    """The path counts as the head does; chunks, extensions and trailers of a body do not disturb."""
    with service.connect() as connection:
        connection.sendall(head("/" + "a" * 70_000, method="GET"))
        assert Answer(connection).read_head() == 431
    with service.connect() as connection:
        body = b"5;name=value\r\nhello\r\n" + LAST_CHUNK[:-2] + b"X-Trailer: 1\r\n\r\n"
        connection.sendall(head("/v1/encodings?granularity=document", TEXT, CHUNKED) + body)
        answer = Answer(connection)
        assert answer.read_head() == 200
        assert lines_of(answer.read_body())[-1]["tokens"] == 5
