"""Uploads that feed a session while they arrive: the same state as one append, whatever happens on the way."""

import base64
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service import feeding as feeder

from dist_attn.settings import FileSettings, StoreSettings
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.fake_sessions import after, stored
from tests.support.files import begin, break_off, offset_of, patch, patch_head
from tests.support.service_process import running_process
from tests.support.service_server import RunningService, running_service
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

BOOK = ("Der Wal ging unter, und das Schiff fuhr weiter nach Süden – wie zuvor. €😀 " * 90).encode()
OPTIONS: dict[str, Any] = {"checkpoint_tokens": 1024, "piece_bytes": 700}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(feeder, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(feeder, "BUSY_SECONDS", 0.3)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service."""
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(keep=False), **OPTIONS) as running:
        yield running


def metadata(**values: object) -> str:
    """tus's header."""
    return ",".join(f"{name} {base64.b64encode(str(value).encode()).decode()}" for name, value in values.items())


def upload(url: str, session: str, length: int = len(BOOK), **more: object) -> str:
    """The address of a new upload that feeds a session."""
    return begin(url, length, **{"Upload-Metadata": metadata(session=session, filetype="text/plain", **more)})


def standing(address: str) -> tuple[int, str, int, int]:
    """Byte, state, token and checkpoint that HEAD names."""
    told = httpx.head(address, timeout=60).headers
    position, kept = int(told["upload-session-position"]), int(told["upload-session-checkpoint"])
    return int(told["upload-offset"]), told["upload-session-state"], position, kept


def wait_for(address: str, state: str) -> tuple[int, str, int, int]:
    """Where it stands, once it is in this state."""
    eventually(lambda: standing(address)[1] == state, f"it to be {state}")
    return standing(address)


def test_the_session_is_that_of_an_append(service: RunningService) -> None:
    """In whichever pieces the bytes come, behind a text or not: it is the state of one append."""
    client = SessionClient(service.url)
    for text, sizes in ((b"", (1, 699, 2000, 41)), (b"A title. ", (len(BOOK),))):
        one, two = client.make(), client.make()
        for session in (one, two) if text else ():
            client.append(session, text)
        client.append(one, BOOK)
        address, at = upload(service.url, two), 0
        assert standing(address) == (0, "waiting", len(text), len(text))
        for size in (*sizes, len(BOOK)):
            piece = BOOK[at : at + size]
            if piece:
                last = patch(address, at, piece)
                at += len(piece)
                assert last.status_code == 204 and last.headers["upload-offset"] == str(at)
        end = len(text) + len(BOOK)
        assert standing(address) == (len(BOOK), "done", end, end) and last.headers["upload-session-state"] == "done"
        assert client.state(two).content == client.state(one).content
        told = httpx.get(address, timeout=60).json()
        assert told["session"]["id"] == two and told["session"]["start"] == len(text)
        assert told["status"] == "completed" and client.append(two, b"x", expected_position=end).start == end


def test_a_broken_connection_goes_on_behind_the_last_state(service: RunningService) -> None:
    """Whole states of what came are kept; who sends the rest costs only what lies behind the last of them."""
    client = SessionClient(service.url)
    session, read = client.make(), service.engine.sessions.read
    address = upload(service.url, session)
    with service.connect() as connection:
        connection.sendall(patch_head(address, 0, len(BOOK)) + BOOK[:5000])
        eventually(lambda: standing(address)[2] > 4500, "most of it to be read while the client sends")
        assert standing(address)[1] == "feeding"
        break_off(connection)
    assert wait_for(address, "waiting") == (5000, "waiting", 4096, 4096)
    assert client.get(f"/v1/sessions/{session}").json()["position"] == 4096
    before = service.engine.sessions.read
    assert 4096 <= before - read <= 5000
    assert patch(address, 5000, BOOK[5000:]).status_code == 204
    assert service.engine.sessions.read - before == len(BOOK) - 4096
    assert client.state(session).content == stored(after(0, BOOK), len(BOOK))


@pytest.mark.slow
def test_a_killed_service_goes_on_at_once(tmp_path: Path) -> None:
    """After kill -9 HEAD names byte, token and checkpoint, the session is free, and the end is that of one append."""
    engine = FakeEngine(keep=False)
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        options = {"checkpoint_tokens": "1024", "piece_bytes": "700"}
        with running_process(tmp_path, address, **options) as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            client = SessionClient(url)
            session = client.make()
            path = upload(url, session).removeprefix(url)

            def slowly() -> Iterator[bytes]:
                yield BOOK[:5000]
                eventually(lambda: standing(url + path)[3] == 4096, "the last state to be kept")
                process.kill()
                process.wait(60)
                yield BOOK[5000:]

            with pytest.raises(httpx.TransportError):
                patch(url + path, 0, slowly(), **{"Content-Length": str(len(BOOK))})
        before = engine.sessions.read
        with running_process(tmp_path, address, **options) as (_, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            at, _, position, kept = standing(url + path)
            assert 4096 <= at <= 5000 and position == kept == 4096
            assert patch(url + path, at, BOOK[at:]).status_code == 204
            assert engine.sessions.read - before == len(BOOK) - 4096
            assert SessionClient(url).state(session).content == stored(after(0, BOOK), len(BOOK))


def test_all_bytes_are_there_and_their_feeder_died(tmp_path: Path) -> None:
    """HEAD alone has the rest of the text read by the next process, or by this one once its engine is back."""
    engine = FakeEngine(keep=False, stingy=True)
    with running_service(tmp_path, engine, store=StoreSettings(), **OPTIONS) as service:
        client = SessionClient(service.url)
        session = client.make()
        path = upload(service.url, session).removeprefix(service.url)
        with service.connect() as connection:
            connection.sendall(patch_head(service.url + path, 0, len(BOOK)) + BOOK)
            eventually(lambda: standing(service.url + path)[3] == 4096, "what may be read to be kept")
            assert standing(service.url + path)[:2] == (len(BOOK), "feeding")
    with running_service(tmp_path, FakeEngine(keep=False), store=StoreSettings(), **OPTIONS) as service:
        address = service.url + path
        assert wait_for(address, "done") == (len(BOOK), "done", len(BOOK), len(BOOK))
        assert service.engine.sessions.read == len(BOOK) - 4096
        assert SessionClient(service.url).state(session).content == stored(after(0, BOOK), len(BOOK))


def test_no_more_is_taken_than_can_be_read_soon(tmp_path: Path) -> None:
    """While the engine takes nothing, an upload is only so far ahead of it; what is there is told all the time."""
    ahead, data = 100_000, bytes(20_000_000)
    engine = FakeEngine(keep=False, stingy=True)
    files = FileSettings(feed_ahead_bytes=ahead)
    with running_service(tmp_path, engine, files=files, checkpoint_tokens=1024) as service:
        session = SessionClient(service.url).make()
        address = begin(service.url, len(data), **{"Upload-Metadata": metadata(session=session)})
        with service.connect() as connection:
            sender = threading.Thread(target=lambda: _send(connection, patch_head(address, 0, len(data)) + data))
            sender.start()
            eventually(lambda: offset_of(address) > ahead, "it to be ahead")
            eventually(lambda: standing(address)[3] == 4096, "the engine to have what it takes")
            assert offset_of(address) < ahead + 700_000 and sender.is_alive()
            connection.shutdown(socket.SHUT_RDWR)
            sender.join(60)
        assert not sender.is_alive()


def _send(connection: Any, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return


def test_sessions_that_cannot_be_fed(service: RunningService) -> None:
    """No such session, one that stands elsewhere, and an empty text are refused by name."""
    client = SessionClient(service.url)
    session = client.make()
    body = {"bytes": 10, "filename": "a", "mime_type": "text/plain", "purpose": "user_data"}
    for more, status, param in (
        ({"session_id": "sess_unknown"}, 404, "session_id"),
        ({"session_id": session, "expected_position": 5}, 409, "expected_position"),
        ({"session_id": session, "bytes": 0}, 400, "session_id"),
        ({"expected_position": 0}, 400, "expected_position"),
    ):
        refused = client.post("/v1/uploads", json={**body, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    strange = {"Upload-Length": "5", "Upload-Metadata": metadata(session=session, expected_position="five")}
    assert httpx.post(f"{service.url}/v1/uploads", headers=strange).status_code == 400
    made = client.post("/v1/uploads", json={**body, "session_id": session, "expected_position": 0}).json()
    assert made["session"] == {
        "id": session, "state": "waiting", "start": 0, "position": 0, "checkpoint": 0, "error": None
    }  # fmt: skip
    assert patch(f"{service.url}/v1/uploads/{made['id']}", 0, b"0123456789").status_code == 204
    assert client.get(f"/v1/sessions/{session}").json()["position"] == 10


def test_a_session_that_moved_meanwhile(service: RunningService) -> None:
    """A clear 409 with both positions, before and between requests; nothing of the upload is fed then."""
    client = SessionClient(service.url)
    session = client.make()
    address = upload(service.url, session)
    client.append(session, b"first")
    moved = patch(address, 0, BOOK)
    assert moved.status_code == 409 and moved.headers["x-should-retry"] == "false"
    assert (moved.json()["expected_position"], moved.json()["position"]) == (0, 5)
    assert standing(address)[:2] == (0, "waiting")
    address = upload(service.url, session)
    assert patch(address, 0, BOOK[:3000]).status_code == 204
    wait_for(address, "waiting")
    kept = client.get(f"/v1/sessions/{session}").json()["position"]
    client.append(session, b"!", expected_position=kept)
    moved = patch(address, 3000, BOOK[3000:])
    assert moved.status_code == 409 and moved.json()["position"] == kept + 1
    assert offset_of(address) == 3000


def test_a_session_that_is_written_to(service: RunningService) -> None:
    """A 409 with Retry-After while somebody appends, and none while the upload's own client comes again."""
    client = SessionClient(service.url)
    session = client.make()
    address, other = upload(service.url, session), upload(service.url, session)
    with service.connect() as connection:
        connection.sendall(patch_head(address, 0, len(BOOK)) + BOOK[:3000])
        eventually(lambda: standing(address)[2] > 2000, "it to be read")
        busy = patch(other, 0, BOOK)
        assert busy.status_code == 409 and busy.json()["error"]["code"] == "session_busy"
        assert int(busy.headers["retry-after"]) > 0
        assert client.append_lines(session, b"x")[-1]["error"]["code"] == "session_busy"
        eventually(lambda: offset_of(address) == 3000, "all of it to be on the disk")
        assert patch(address, 3000, BOOK[3000:]).status_code == 204
    assert client.state(session).content == stored(after(0, BOOK), len(BOOK))


def test_failures_say_where_it_stands(service: RunningService) -> None:
    """A text that is not UTF-8 and an engine that fails end the request; what came and what was kept stays."""
    client = SessionClient(service.url)
    session = client.make()
    address = upload(service.url, session)
    spoilt = patch(address, 0, BOOK[:4000] + b"\xff" + BOOK[4001:])
    assert spoilt.status_code == 400 and spoilt.json()["error"]["code"] == "invalid_utf8"
    assert wait_for(address, "failed")[3] in (0, 1024, 2048, 3072)
    assert "not valid UTF-8" in httpx.get(address, timeout=60).json()["session"]["error"]
    session = client.make()
    address = upload(service.url, session)
    service.engine.fail_at = 3000
    failed = patch(address, 0, BOOK)
    service.engine.fail_at = None
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_failed"
    if (at := offset_of(address)) < len(BOOK):
        assert patch(address, at, BOOK[at:]).status_code == 204
    wait_for(address, "done")
    assert client.state(session).content == stored(after(0, BOOK), len(BOOK))


def test_an_upload_that_is_given_up(service: RunningService) -> None:
    """Deleting it ends the feeding; the session keeps its last state and is free."""
    client = SessionClient(service.url)
    session = client.make()
    address = upload(service.url, session)
    assert patch(address, 0, BOOK[:3000]).status_code == 204
    assert httpx.delete(address, timeout=60).status_code == 204
    eventually(lambda: not client.get(f"/v1/sessions/{session}").json()["busy"], "it to be free")
    position = client.get(f"/v1/sessions/{session}").json()["position"]
    assert position % 1024 == 0 and client.append(session, b"x").start == position
    assert httpx.head(address, timeout=60).status_code == 404
