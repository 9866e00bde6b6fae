"""Appends: a text into a session while it is sent, each part of it once, whoever dies or comes again."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.sessions.writer import writing

from dist_attn.settings import StoreSettings
from dist_attn.store import Reached, StoreLimits
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.open import StateStore
from dist_attn.wire.messages import Failed, Status, Tokens
from tests.support.fake_engine import FakeEngine
from tests.support.fake_sessions import after, stored
from tests.support.opening import draw_of, is_session
from tests.support.raw_http import CHUNKED, LAST_CHUNK, TEXT, Answer, chunk, head
from tests.support.service_server import RunningService, running_service
from tests.support.sessions import SessionClient
from tests.support.stores import Clock, redis_server, stream, why_no_redis
from tests.support.waiting import eventually

BOOK = "".join(f"Line {n} of a book that is long enough. " for n in range(130)).encode()  # 4,900 tokens

JSON = {"content-type": "application/json"}
JSON_HEAD = "Content-Type: application/json"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service that keeps a state every 512 tokens, for tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service"), checkpoint_tokens=512) as running:
        yield running


def position(client: SessionClient, session: str) -> int:
    """Where a session stands."""
    found: int = client.get(f"/v1/sessions/{session}").json()["position"]
    return found


def fed(engine: FakeEngine, since: int) -> list[tuple[int, int]]:
    """The ranges of tokens that the engine was given after so many messages."""
    messages = [message for message in engine.received[since:] if isinstance(message, Tokens)]
    return [(message.start, message.start + len(message.tokens) // 4) for message in messages if message.tokens]


def uploaded(client: SessionClient) -> str:
    """The id of a file that holds the book."""
    files = {"file": ("book.txt", BOOK, "text/plain")}
    made: str = client.post("/v1/files", files=files, data={"purpose": "user_data"}).json()["id"]
    return made


@pytest.mark.parametrize("form", ["whole", "pieces", "json", "file"])
def test_a_text_is_read_into_the_session(service: RunningService, form: str) -> None:
    """However it is sent, the state is that of its tokens, and the last line says what was done."""
    client = SessionClient(service.url)
    session = client.make()
    if form in ("json", "file"):
        body = {"input": BOOK.decode()} if form == "json" else {"file_id": uploaded(client)}
        answer = client.post(f"/v1/sessions/{session}/append", json=body)
        lines = [json.loads(line) for line in answer.text.splitlines()]
    else:
        pieces = (BOOK[at : at + 700] for at in range(0, len(BOOK), 700))
        lines = client.append_lines(session, BOOK if form == "whole" else pieces)
    *progress, last = lines
    assert last == {
        "restored_position": 0, "recomputed_tokens": 0, "bit_exact": True, "reason": "", "object": "session.append",
        "session": session, "model": "tiny", "start": 0, "position": len(BOOK), "tokens": len(BOOK),
        "checkpoints": [*range(512, len(BOOK), 512), len(BOOK)], "replayed": False,
    }  # fmt: skip
    assert all(line["object"] == "session.append.progress" and line["kept"] <= line["position"] for line in progress)
    assert client.state(session).content == stored(after(0, BOOK), len(BOOK))
    assert client.state(session, position=1024).content == stored(after(0, BOOK[:1024]), 1024)


def test_a_file_is_read_to_its_end_without_its_client(tmp_path: Path) -> None:
    """A client that leaves an append of a file cuts nothing off, and is told under its key what it came to."""
    engine = FakeEngine(paused=True)
    with running_service(tmp_path, engine, checkpoint_tokens=512) as service:
        client = SessionClient(service.url)
        session, file = client.make(), uploaded(client)
        path, body = f"/v1/sessions/{session}/append", json.dumps({"file_id": file}).encode()
        with service.connect() as connection:
            connection.sendall(head(path, JSON_HEAD, "Idempotency-Key: book", f"Content-Length: {len(body)}") + body)
            eventually(lambda: client.get(f"/v1/sessions/{session}").json()["busy"], "the append to begin")
        service.engine_port.resume()
        eventually(lambda: position(client, session) == len(BOOK), "the whole file")
        answer = client.post(path, content=body, headers={**JSON, "idempotency-key": "book"})
        assert json.loads(answer.text.splitlines()[-1])["replayed"]
        both = client.post(path, json={"input": "x", "file_id": file})
        assert both.status_code == 400 and both.json()["error"]["param"] == "file_id"


def test_lines_say_how_far_an_append_is(tmp_path: Path) -> None:
    """They come also while nothing moves, and the text goes on behind them."""
    with running_service(tmp_path, FakeEngine(), ping_seconds=0.1) as service:
        client = SessionClient(service.url)
        path = f"/v1/sessions/{client.make()}/append"
        with service.connect() as connection, connection.makefile("rb") as answer:
            begin = head(path, "Content-Type: application/octet-stream", CHUNKED)
            connection.sendall(begin + chunk(BOOK[:1024]))
            lines = (json.loads(line) for line in answer if line.startswith(b"{"))
            places = [next(lines)["position"] for _ in range(4)]
            connection.sendall(chunk(b"x") + LAST_CHUNK)
            assert next(line["position"] for line in lines if "tokens" in line) == 1025
    assert places == sorted(places) and places[-1] <= 1024


def test_each_append_is_tokenised_by_itself(service: RunningService) -> None:
    """A second text goes on after the first; a character that is cut between two of them is refused where it begins."""
    client = SessionClient(service.url)
    session = client.make()
    first, second = client.append(session, "Hyv"), client.append(session, "ä päivää".encode())
    assert (first.position, second.start, second.position) == (3, 3, 15)
    assert (second.restored_position, second.recomputed_tokens, second.bit_exact) == (3, 0, True)
    lines = client.append_lines(session, "ä".encode()[:1])
    assert lines[-1]["error"]["code"] == Code.INVALID_UTF8
    octets = {"content-type": "application/octet-stream"}
    for half in ("ä".encode()[:1], "ä".encode()[1:]):
        assert client.post(f"/v1/sessions/{session}/append", content=half, headers=octets).status_code == 200
    assert client.state(session).content == stored(after(0, "Hyvä päiväää".encode()), 17)


def test_a_session_that_stands_elsewhere(service: RunningService) -> None:
    """With another `expected_position` nothing is fed; the 409 has both values and no client sends it again."""
    client = SessionClient(service.url)
    session = client.make()
    assert client.append(session, "abc", expected_position=0).position == 3
    before = len(service.engine.received)
    path = f"/v1/sessions/{session}/append"
    for answer in (
        client.post(path, content=b"x", params={"expected_position": 0}),
        client.post(path, json={"input": "x", "expected_position": 0}),
        client.post(f"/v1/sessions/{session}/generate", json={"expected_position": 0}),
    ):
        body = answer.json()
        assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
        assert (body["error"]["code"], body["expected_position"], body["position"]) == ("conflict", 0, 3)
    both = client.post(path, json={"input": "x", "expected_position": 0}, params={"expected_position": 3})
    assert both.status_code == 400 and both.json()["error"]["param"] == "expected_position"
    assert fed(service.engine, before) == [] and position(client, session) == 3


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_same_key_is_fed_once(service: RunningService, form: str) -> None:
    """An append that was done is only said again; another text under its key is a 409, and so is another place."""
    client = SessionClient(service.url)
    session = client.make()

    def send(text: str, key: str, **more: Any) -> httpx.Response:
        options: dict[str, Any] = {"content": text.encode()} if form == "text" else {"json": {"input": text}}
        return client.post(f"/v1/sessions/{session}/append", headers={"idempotency-key": key}, params=more, **options)

    first = json.loads(send("once only", "k1", expected_position=0).text.splitlines()[-1])
    before = len(service.engine.received)
    again = send("once only", '"k1"', expected_position=0)
    assert json.loads(again.text.splitlines()[-1]) == {**first, "replayed": True}
    for other in (send("other text", "k1"), send("", "k1"), send("once only", "k1", expected_position=9)):
        assert (other.status_code in (400, 409) and "x-should-retry" in other.headers) or other.status_code == 400
    assert fed(service.engine, before) == [] and position(client, session) == 9
    assert json.loads(send("once only", "k2").text.splitlines()[-1])["position"] == 18
    for key in ("", "ä", "x" * 257, "a b", '"', '""k1'):
        refused = client.post(f"/v1/sessions/{session}/append", content=b"x", headers={"idempotency-key": key.encode()})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "Idempotency-Key", key


def broken_off(service: RunningService, session: str, key: str, text: bytes, kept: int) -> None:
    """Begin an append and leave in the middle of the text, once the engine has had it; wait until `kept` is kept."""
    with service.connect() as connection:
        path = f"/v1/sessions/{session}/append"
        connection.sendall(head(path, TEXT, CHUNKED, f"Idempotency-Key: {key}") + chunk(text))
        assert Answer(connection).read_head() == 200
    client = SessionClient(service.url)

    def settled() -> bool:
        found = client.get(f"/v1/sessions/{session}").json()
        return found["position"] == kept and not found["busy"]

    eventually(settled, f"the session to stand at {kept}, free")


def test_a_client_that_dies_in_the_middle_goes_on(service: RunningService) -> None:
    """What it had sent is kept as far as whole states go; with its key the rest is fed, and nothing of it twice."""
    client = SessionClient(service.url)
    session = client.make()
    broken_off(service, session, "k", BOOK[:3000], 2560)
    assert service.engine.open_count == 0
    before = len(service.engine.received)
    last = client.append(session, BOOK, "k", expected_position=0)
    assert (last.start, last.position, last.tokens, last.restored_position) == (0, len(BOOK), len(BOOK), 2560)
    ranges = fed(service.engine, before)
    assert ranges[0][0] == 2560 and ranges[-1][1] == len(BOOK)
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    assert client.state(session).content == stored(after(0, BOOK), len(BOOK))
    assert client.append(session, BOOK, "k").replayed


@pytest.mark.parametrize("text", [BOOK[:2000], b"x" + BOOK[1:], BOOK[:2559] + b"#" + BOOK[2560:]])
def test_another_text_does_not_go_on_with_half_an_append(service: RunningService, text: bytes) -> None:
    """A key whose append is half done takes only the text that it began with: what differs is refused, not fed."""
    client = SessionClient(service.url)
    session = client.make()
    broken_off(service, session, "k", BOOK[:2600], 2560)
    lines = client.append_lines(session, text, "k")
    assert lines[-1]["error"]["code"] == "conflict" and "another text" in lines[-1]["error"]["message"]
    assert position(client, session) == 2560
    assert client.append(session, BOOK, "k").position == len(BOOK)


def test_half_an_append_with_another_behind_it(service: RunningService) -> None:
    """Its rest cannot follow: a 409 tells which part is kept and where the session stands; a fork there takes it."""
    client = SessionClient(service.url)
    session = client.make()
    client.append(session, b"first ")
    broken_off(service, session, "k", BOOK[:3000], 2560)
    kept = position(client, session)
    client.append(session, b"another")
    refused = client.append_lines(session, BOOK, "k")[-1]
    assert (refused["status"], refused["error"]["code"]) == (409, "conflict")
    assert (refused["start"], refused["expected_position"], refused["position"]) == (6, kept, kept + 7)
    fork = client.post(f"/v1/sessions/{session}/fork", json={"position": refused["expected_position"]}).json()["id"]
    assert client.append(fork, BOOK[refused["expected_position"] - 6 :], "rest").position == 6 + len(BOOK)
    assert client.state(fork).content == stored(after(0, b"first " + BOOK), 6 + len(BOOK))


def test_a_client_that_leaves_after_the_text_is_read_on(tmp_path: Path) -> None:
    """Once the whole text has been sent nobody needs to wait for the answer: it is read and kept."""
    with running_service(tmp_path) as service:
        client = SessionClient(service.url)
        session = client.make()
        service.engine.paused = True
        with service.connect() as connection:
            path = f"/v1/sessions/{session}/append"
            connection.sendall(head(path, TEXT, CHUNKED, "X-Request-Id: left") + chunk(BOOK) + LAST_CHUNK)
            eventually(lambda: client.get(f"/v1/sessions/{session}").json()["busy"], "the append to begin")
        service.engine_port.resume()
        eventually(lambda: position(client, session) == len(BOOK), "the text to be read")
        assert service.logged("left")["position"] == len(BOOK)


def test_one_writes_at_a_time(tmp_path: Path) -> None:
    """While a session is written to, everybody else is told when to come back, and reading goes on."""
    with running_service(tmp_path) as service:
        client = SessionClient(service.url)
        session = client.make()
        client.append(session, "abc")
        state = client.state(session)
        service.engine.paused = True
        with service.connect() as connection:
            connection.sendall(head(f"/v1/sessions/{session}/append", TEXT, "Content-Length: 3") + b"def")
            eventually(lambda: client.get(f"/v1/sessions/{session}").json()["busy"], "the append to begin")
            for answer in (
                client.post(f"/v1/sessions/{session}/append", content=b"x"),
                client.post(f"/v1/sessions/{session}/generate"),
                client.put(
                    f"/v1/sessions/{session}/state", content=state.content, headers={"if-match": state.headers["etag"]}
                ),
            ):
                assert answer.status_code == 409 and answer.json()["error"]["code"] == "session_busy", answer.text
                assert 1 <= int(answer.headers["retry-after"]) <= 60 and "x-should-retry" not in answer.headers
            assert client.state(session).content == state.content
            service.engine_port.resume()
            answer = Answer(connection)
            assert answer.read_head() == 200
            assert json.loads(answer.read_body().splitlines()[-1])["position"] == 6


def test_a_writer_that_was_taken_for_dead_changes_nothing() -> None:
    """One that lives keeps the session however long it takes; one that was silent is told up to where it wrote."""

    async def work() -> None:
        clock = Clock()
        async with await StateStore.over(MemoryRecords(), MemoryBlobs(), StoreLimits(writer_s=0.2), clock) as store:
            session = (await store.sessions.create("ann")).id
            async with writing(store, "ann", session, "a", None) as writer:
                for _ in range(4):
                    clock.now += 0.15
                    await asyncio.sleep(0.1)
                    with pytest.raises(ServiceError, match="being written to"):
                        async with writing(store, "ann", session, "b", None):
                            pass
                await writer.advance(Reached(5, (await store.snapshots.put("ann", stream(b"five"))).id))
            with pytest.raises(ServiceError, match="given to another writer") as lost:
                async with writing(store, "ann", session, "a", 0) as writer:
                    assert writer.kept == 5
                    clock.now += 10
                    await store.sessions.begin_append("ann", session, "c")
                    await asyncio.sleep(20)
            assert lost.value.facts == {"position": 5}
            assert (await store.sessions.get("ann", session)).position == 5

    asyncio.run(asyncio.wait_for(work(), 60))


def test_what_cannot_be_appended(tmp_path: Path) -> None:
    """Nothing, too much, other media and other bytes are refused in words that name what is wrong."""
    with running_service(tmp_path, body_bytes=5000) as service:
        client = SessionClient(service.url)
        session = client.make()
        path = f"/v1/sessions/{session}/append"
        cases: list[tuple[int, str, dict[str, Any]]] = [
            (400, "empty_input", {"content": b""}),
            (400, "empty_input", {"json": {"input": ""}}),
            (400, "missing_parameter", {"json": {}}),
            (400, "unknown_parameter", {"json": {"input": "x", "wat": 1}}),
            (400, "invalid_value", {"content": b"x", "params": {"expected_position": "-1"}}),
            (400, "unknown_parameter", {"content": b"x", "params": {"position": "1"}}),
            (400, "invalid_json", {"content": b'{"input": "\\ud800"}', "headers": JSON}),
            (413, "body_too_large", {"content": b"x" * 5001}),
            (415, "unsupported_media_type", {"content": b"x", "headers": {"content-type": "image/png"}}),
            (404, "not_found", {"content": b"x", "url": f"/v1/sessions/{session}x/append"}),
        ]
        for status, code, options in cases:
            answer = client.post(options.pop("url", path), **options)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        late = client.append_lines(session, (b"x" * 100 for _ in range(60)))
        assert late[-1]["error"]["code"] == "body_too_large" and late[-1]["position"] == 0
        assert position(client, session) == 0 and client.append(session, "fine").position == 4


def test_an_engine_that_fails(tmp_path: Path) -> None:
    """Refusals come as problems, failures in the middle as a last line that says where the session stands."""
    with running_service(tmp_path, checkpoint_tokens=512, engine_ready_seconds=0.1) as service:
        client, engine = SessionClient(service.url), service.engine
        session = client.make()
        path = f"/v1/sessions/{session}/append"
        engine.refuse = "overloaded"
        assert client.post(path, content=BOOK).status_code == 429
        engine.refuse = None
        engine.ready, engine.reason = False, "rank 1 is stuck"
        refused = client.post(path, content=BOOK)
        assert refused.status_code == 503 and "rank 1 is stuck" in refused.text
        engine.ready = True

        def text() -> Iterator[bytes]:
            yield BOOK[:2000]
            eventually(lambda: position(client, session) == 1536, "three states to be kept")
            (name,) = engine.sessions._open
            service.engine_port.inject(Failed(name, "engine_failed", "rank 1 died"))
            yield BOOK[2000:]

        last = client.append_lines(session, text(), "k")[-1]
        assert (last["object"], last["error"]["code"], last["position"]) == ("error", "engine_failed", 1536)
        assert client.append(session, BOOK, "k").restored_position == 1536
        assert client.state(session).content == stored(after(0, BOOK), len(BOOK))


def test_models_whose_states_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a manifest has no sessions that could be written to, and says so."""
    with running_service(tmp_path) as service:
        without: Callable[[], Status] = FakeEngine(hidden_size=8).status
        monkeypatch.setattr(service.engine, "status", lambda: msgspec.structs.replace(without(), manifest=None))
        client = SessionClient(service.url)
        session = client.make()
        answer = client.post(f"/v1/sessions/{session}/append", content=b"x")
        assert answer.status_code == 400 and "no states of a text that could be stored" in answer.text


@pytest.mark.parametrize("place", ["folder", "redis"])
def test_two_services_share_a_store(tmp_path: Path, place: str) -> None:
    """Two services over a folder or a Redis serve the same sessions; what one has written the other goes on with."""
    if place == "redis" and (lack := why_no_redis()):
        pytest.skip(lack)
    store = StoreSettings(address=redis_server() if place == "redis" else str(tmp_path / "states"))
    with running_service(tmp_path / "a", store=store) as first, running_service(tmp_path / "b", store=store) as second:
        one, two = SessionClient(first.url), SessionClient(second.url)
        session = one.make()
        assert one.append(session, "The one. ", "k").position == 9
        assert two.append(session, "The one. ", "k").replayed
        assert two.append(session, "The other.").restored_position == 9
        first.engine.paused = True
        with first.connect() as connection:
            connection.sendall(head(f"/v1/sessions/{session}/append", TEXT, "Content-Length: 1") + b"x")
            eventually(lambda: two.get(f"/v1/sessions/{session}").json()["busy"], "the append to begin")
            assert two.post(f"/v1/sessions/{session}/append", content=b"y").status_code == 409
            # before the connection ends: an append whose client has gone may end without what it had not read
            first.engine_port.resume()
            eventually(lambda: position(two, session) == 20, "the append to end")


def test_the_engine_is_asked_for_one_request(service: RunningService) -> None:
    """An append is one piece of work that begins with the stored state, and tokens go on from its position."""
    client = SessionClient(service.url)
    session = client.make()
    client.append(session, BOOK[:1000])
    before = len(service.engine.received)
    client.append(session, BOOK[1000:])
    (opened,) = [message for message in service.engine.received[before:] if is_session(message)]
    assert opened.begin is not None and opened.begin.position == 1000 and draw_of(opened) is None
    tokens = b"".join(message.tokens for message in service.engine.received[before:] if isinstance(message, Tokens))
    assert np.frombuffer(tokens, "<i4").tolist() == list(BOOK[1000:])
    digest = hashlib.sha256(client.state(session).content).hexdigest()
    assert client.state(session).headers["etag"] == f'"{digest}"'
