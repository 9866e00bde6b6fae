"""A client that leaves stops its work wherever it is: before the engine, queued, prefilling or decoding."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from dist_attn.wire.messages import Generated, Tokens
from tests.support.fake_engine import FakeEngine
from tests.support.opening import is_opening
from tests.support.raw_http import CHUNKED, TEXT, Answer, chunk, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

KINDS = ["whole", "stream", "embedding", "encoding"]


def send(connection: socket.socket, kind: str) -> None:
    """A request of that kind: a prompt, an input or a document of a thousand bytes; the document goes on for ever."""
    text = "x" * 1000
    if kind == "encoding":
        connection.sendall(head("/v1/encodings", TEXT, CHUNKED, "x-request-id: gone") + chunk(text.encode()))
        return
    path, body = "/v1/completions", {"prompt": text, "stream": kind == "stream"}
    if kind == "embedding":
        path, body = "/v1/embeddings", {"input": text}
    data = json.dumps(body).encode()
    headers = ("Content-Type: application/json", "x-request-id: gone", f"Content-Length: {len(data)}")
    connection.sendall(head(path, *headers) + data)


def leave(service: RunningService, kind: str, when: Callable[[], bool], what: str) -> None:
    """Send a request, close the connection as soon as `when` holds, and wait for its line of log."""
    with service.connect() as connection:
        send(connection, kind)
        eventually(when, what)
    assert service.logged("gone")["reason"] == "client_gone"


def tokens_sent(engine: FakeEngine) -> int:
    """How many tokens the engine was given."""
    return sum(len(message.tokens) // 4 for message in engine.received if isinstance(message, Tokens))


def opened(engine: FakeEngine) -> bool:
    """Whether the engine has been asked for work."""
    return any(is_opening(message) for message in engine.received)


@pytest.mark.parametrize("kind", KINDS)
def test_while_it_waits_for_the_engine(tmp_path: Path, kind: str) -> None:
    """A request that waits for a restart gives its place back, and the engine never hears of it."""
    engine = FakeEngine(ready=False, reason="epoch 2 starts")
    with running_service(tmp_path, engine) as service:

        def waiting() -> int:
            count: int = httpx.get(f"{service.url}/v1/status").json()["waiting_requests"]
            return count

        leave(service, kind, lambda: waiting() == 1, "the request to wait")
        assert waiting() == 0
        engine.ready = True
        assert httpx.get(f"{service.url}/v1/status").json()["open_requests"] == 0
        assert not opened(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_while_it_is_queued(tmp_path: Path, kind: str) -> None:
    """A request that the controller has not taken yet is cancelled there."""
    engine = FakeEngine(mute=True)
    with running_service(tmp_path, engine) as service:
        leave(service, kind, lambda: opened(engine), "the request to reach the controller")
        eventually(lambda: len(engine.cancelled) == 1, "the cancel")
        assert tokens_sent(engine) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_while_it_is_prefilled(tmp_path: Path, kind: str) -> None:
    """A request whose input is half in the engine is cancelled, and no further token is sent."""
    engine = FakeEngine(credit=100, stingy=True)
    with running_service(tmp_path, engine) as service:
        leave(service, kind, lambda: tokens_sent(engine) == 100, "the first tokens")
        eventually(lambda: len(engine.cancelled) == 1 and engine.open_count == 0, "the cancel")
        assert tokens_sent(engine) == 100


@pytest.mark.parametrize("kind", ["whole", "stream"])
def test_while_it_is_decoded(tmp_path: Path, kind: str) -> None:
    """A completion in the middle of its text is cancelled."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine) as service, service.connect() as connection:
        send(connection, kind)
        eventually(lambda: tokens_sent(engine) == 1000, "the prompt")
        service.engine_port.inject(Generated(engine.open_ids[0], [104, 105]))
        if kind == "stream":
            answer = Answer(connection)
            assert answer.read_head() == 200
            assert b'"text":"hi"' in answer.read_chunk()
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        eventually(lambda: len(engine.cancelled) == 1 and engine.open_count == 0, "the cancel")
        line = service.logged("gone")
        assert line["reason"] == "client_gone"
        assert line["completion_tokens"] in ((2,) if kind == "stream" else (0, 2))


def test_all_choices_are_cancelled(tmp_path: Path) -> None:
    """Every choice of a completion leaves the engine with its client."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine) as service:
        with httpx.stream(
            "POST", f"{service.url}/v1/completions", json={"prompt": ["a", "b"], "n": 3, "stream": True}
        ) as answer:
            assert answer.status_code == 200
            eventually(lambda: engine.open_count == 6, "all choices")
        eventually(lambda: len(engine.cancelled) == 6 and engine.open_count == 0, "the cancels")
