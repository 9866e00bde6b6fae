"""What a connection may do besides one request after the other: pipelines, old versions, upgrades, half an end."""

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from inspect import signature
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from dist_attn_service import api_process
from dist_attn_service.http import protocol
from dist_attn_service.http.protocol import PIPELINED, BoundedProtocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tests.support.fake_engine import FakeEngine
from tests.support.raw_http import CHUNKED, LAST_CHUNK, TEXT, Answer, chunk, head, lines_of, send_in_background
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import PATIENCE_SECONDS, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave it as they found it."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
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
def test_a_connection_is_not_held_by_a_few_bytes(tmp_path: Path, rest: str) -> None:
    """After an answer neither an empty line nor the slow rest of a refused body keeps the connection open."""
    with running_service(tmp_path, request_head_seconds=1) as service, service.connect() as connection:
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


def test_an_early_answer_is_not_reset_away(tmp_path: Path) -> None:
    """A client that still sends when its connection's last answer has come may send on and read then."""
    early = {
        "refused": (head("/v1/encodings?window=0", TEXT, CHUNKED, "Connection: close"), 400),
        "too large": (head("/v1/encodings", TEXT, "Connection: close", "Content-Length: 9000000"), 413),
        "old": (head("/nothing", "Content-Length: 9000000").replace(b"HTTP/1.1", b"HTTP/1.0"), 404),
        "no HTTP": (b"nonsense\r\n\r\n", 400),
    }
    piece = chunk(b"x" * 1000)
    with running_service(tmp_path, body_bytes=2000) as service, ExitStack() as connections:
        answers = {}
        for name, (request_head, status) in early.items():
            connection = connections.enter_context(service.connect())
            connection.sendall(request_head)
            sent = send_in_background(connection, 3 * piece)
            answers[name] = Answer(connection)
            assert answers[name].read_head() == status, name
            sent.join()
            for _ in range(20):
                connection.sendall(piece)
            assert answers[name].read_body(), name
        # Each connection is held a while for what may still come: all of them at once.
        for name, answer in answers.items():
            assert answer.at_end(), name


def test_an_unread_answer_that_is_cut_off_has_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that first sends all and then reads, as httpx does, finds all rows up to the error line that says where
    to go on, though the service was stopped while it sent, and rows filled all buffers.
    """
    monkeypatch.setattr(protocol, "LINGER_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(api_process, "LAST_SECONDS", PATIENCE_SECONDS)
    engine = FakeEngine()
    with ThreadPoolExecutor(1) as threads, running_service(tmp_path, engine, shutdown_seconds=1) as service:

        def pieces() -> Iterator[bytes]:
            yield b"x" * 400_000  # its rows are 8 MB
            service.logged("cut")
            for _ in range(20):
                yield b"x" * 1000

        def ask() -> httpx.Response:
            headers = {"content-type": "text/plain", "x-request-id": "cut"}
            return httpx.post(f"{service.url}/v1/encodings?window=8", content=pieces(), headers=headers, timeout=60)

        asked = threads.submit(ask)
        eventually(lambda: engine.open_count == 1, "the request to reach the engine")
        service.stop()
        lines = lines_of(asked.result().content)
    assert lines[-1]["error"]["code"] == "stopping"
    assert lines[-1]["reached"] == {"next_row": len(lines) - 1}


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


@pytest.mark.parametrize("offering", [1, 2])
def test_an_offer_to_upgrade_behind_a_body_is_ignored(service: RunningService, offering: int) -> None:
    """Two requests in one piece have two answers, whichever of them offers: no body is taken for a request."""
    offer = ("Connection: Upgrade", "Upgrade: h2c")
    hidden = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    requests = [completion(f"offer-{i}", *(offer if i == offering else ()), prompt=hidden) for i in (1, 2)]
    with service.connect() as connection:
        connection.sendall(b"".join(requests) + head("/livez", "Connection: close", *offer, method="GET"))
        answer = Answer(connection)
        for name in ("offer-1", "offer-2"):
            assert answer.read_head() == 200 and answer.headers["x-request-id"] == name
            assert json.loads(answer.read_body())["usage"]["prompt_tokens"] == len(hidden)
        assert answer.read_head() == 200 and answer.read_body() == b'{"alive":true}'
        assert answer.at_end()


@pytest.mark.parametrize(
    ("request_head", "status", "words"),
    [
        ("GET /livez HTTP/1.1", 400, "0 headers Host"),
        ("GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400, "2 headers Host"),
        ("GET /livez HTTP/1.0\r\nHost: localhost\r\nHost: localhost", 400, "2 headers Host"),
        ("GET /livez HTTP/2.0\r\nHost: localhost", 505, "send HTTP/1.1"),
        ("GET /livez HTTP/0.9\r\nHost: localhost", 505, "send HTTP/1.1"),
        ("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked", 501, "chunked alone"),
        ("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, chunked", 400, "not valid"),
        ("POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked", 400, "Content-Length"),
        ("CONNECT localhost:1 HTTP/1.1\r\nHost: localhost", 400, "proxy"),
    ],
)
def test_a_head_that_asks_for_what_is_not_spoken(
    service: RunningService, request_head: str, status: int, words: str
) -> None:
    """It is refused with words and the connection ends, so that nobody can read its body in another way than we do."""
    with service.connect() as connection:
        connection.sendall(request_head.encode() + b"\r\n\r\n" + LAST_CHUNK + head("/livez", method="GET"))
        answer = Answer(connection)
        assert answer.read_head() == status
        problem = json.loads(answer.read_body())
        assert problem["error"]["code"] == "bad_http" and words in problem["detail"]
        assert answer.at_end()


def test_a_request_of_http_1_0_needs_no_host(service: RunningService) -> None:
    """Host came with HTTP/1.1."""
    with service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        answer = Answer(connection)
        assert answer.read_head() == 200 and answer.read_body() == b'{"alive":true}'


def test_a_trailer_is_no_header(service: RunningService) -> None:
    """What stands behind a body cannot pass for a header, such as one that a proxy sets or removes."""
    with service.connect() as connection:
        body = chunk(b'{"prompt": "ab", "max_tokens": 4}') + LAST_CHUNK[:-2] + b"x-request-id: trailer\r\n\r\n"
        connection.sendall(head("/v1/completions", CHUNKED) + body)
        answer = Answer(connection)
        assert answer.read_head() == 200 and answer.headers["x-request-id"].startswith("req-")


def test_a_body_is_no_part_of_the_head_behind_it(service: RunningService) -> None:
    """A head that begins in the same piece as a long body ends is measured alone."""
    text = "ab" * 50_000
    with service.connect() as connection:
        connection.sendall(head("/v1/encodings?granularity=document", TEXT, "Content-Length: 100000"))
        connection.sendall(text.encode() + b"GET /livez HTTP/1.1\r\n")
        answer = Answer(connection)
        assert answer.read_head() == 200
        assert lines_of(answer.read_body())[-1]["tokens"] == 100_000
        connection.sendall(b"Host: localhost\r\n\r\n")
        assert answer.read_head() == 200 and answer.read_body() == b'{"alive":true}'


FLOODS = {
    "blank lines": b"\r\n",
    "headers": b"a:\r\n",
    "one header": b"a",
    "trailer": b"a",
    "requests": head("/livez", method="GET"),
    "offers": head("/livez", "Connection: upgrade", "Upgrade: x", method="GET"),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_is_not_parsed_beyond_its_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flood: str) -> None:
    """A megabyte of it costs the event loop no more than its first bytes do: each read goes to the parser as it is,
    none after the refusal, and no head is read that is not going to be answered.
    """
    reads, parsed, heads, most_read = [], [], [], 256 << 10

    def counting(owner: type, name: str, seen: list[Any]) -> None:
        original = getattr(owner, name)

        def counted(self: HttpToolsProtocol, *data: bytes) -> None:
            seen.extend(data or [b""])
            original(self, *data)

        monkeypatch.setattr(owner, name, counted)

    counting(HttpToolsProtocol, "data_received", parsed)
    counting(BoundedProtocol, "data_received", reads)
    counting(BoundedProtocol, "on_headers_complete", heads)
    one = FLOODS[flood]
    with running_service(tmp_path) as service, service.connect() as connection:
        start = head("/livez", method="GET")[:-2] + b"b: " if "header" in flood else b""
        if flood == "trailer":
            start = head("/tokenize", CHUNKED) + LAST_CHUNK[:-2] + b"b: "
        sender = send_in_background(connection, start + one * ((1 << 20) // len(one)))
        answer = Answer(connection)
        assert answer.read_head() in (400, 431)
        assert json.loads(answer.read_body())["error"]["code"] in ("bad_http", "head_too_large")
        sender.join()
        with suppress(OSError):  # it may have ended
            connection.shutdown(socket.SHUT_WR)  # nothing more comes, for which it would be held a while
        assert answer.at_end()
        assert len(parsed) <= len(reads)
        assert sum(map(len, parsed)) <= service.settings.request_head_bytes + most_read
        assert len(heads) <= 2 * (PIPELINED + 2)  # with an offer to upgrade each is read twice


def test_uvicorn_has_what_the_protocol_is_built_on() -> None:
    """uvicorn promises none of these names: a version without one of them must not be accepted in pyproject.toml."""

    async def made() -> tuple[BoundedProtocol, RequestResponseCycle]:
        config = uvicorn.Config(lambda *_: None, log_config=None)
        config.load()
        protocol = BoundedProtocol(config, ServerState(), {}, asyncio.get_running_loop())
        protocol.on_message_begin()
        nothing: list[Any] = [None] * len(signature(RequestResponseCycle).parameters)
        return protocol, RequestResponseCycle(*nothing)

    protocol, cycle = asyncio.run(made())
    inherited = (
        "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete",
        "send_400_response",
        "connection_made", "connection_lost", "eof_received", "data_received", "on_response_complete", "shutdown",
        "loop", "transport", "flow", "parser", "url", "headers", "scope", "cycle", "pipeline",
    )  # fmt: skip
    of_cycle = (
        "scope", "send", "disconnected", "message_event", "response_started", "response_complete", "chunked_encoding",
        "expected_content_length", "keep_alive", "transport",
    )  # fmt: skip
    has = dir(HttpToolsProtocol) + list(vars(protocol))
    gone = [f"HttpToolsProtocol.{name}" for name in inherited if name not in has]
    gone += [f"RequestResponseCycle.{name}" for name in of_cycle if not hasattr(cycle, name)]
    assert not gone, (
        f"uvicorn {uvicorn.__version__} has no {', '.join(gone)} any more: "
        "adapt dist_attn_service/http/protocol.py to it, or lower the bound of uvicorn in pyproject.toml"
    )
