"""What holds for every route: request ids, log lines, readiness, the head's bounds, the documentation."""

import asyncio
import gzip
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from dist_attn_service.http.exchange import RequestBody

from tests.support.fake_engine import FakeEngine
from tests.support.raw_http import Answer, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def test_every_answer_has_a_request_id(service: RunningService) -> None:
    """A plain id of the client is kept, anything else is replaced, errors have one too."""
    own = httpx.get(f"{service.url}/livez", headers={"x-request-id": "abc-1.2_3"})
    assert own.headers["x-request-id"] == "abc-1.2_3"
    strange = httpx.get(f"{service.url}/livez", headers={"x-request-id": "a b<script>"})
    assert strange.headers["x-request-id"].startswith("req-")
    ids = {httpx.get(f"{service.url}{path}").headers["x-request-id"] for path in ("/livez", "/nothing", "/readyz")}
    assert len(ids) == 3


def test_one_log_line_per_request_says_why_it_ended(service: RunningService) -> None:
    """The line has id, method, path, status, seconds and the reason."""
    for request_id, path, status, reason in (("log-1", "/livez", 200, "finished"), ("log-2", "/x", 404, "not_found")):
        httpx.get(f"{service.url}{path}", headers={"x-request-id": request_id})
        line = service.logged(request_id)
        assert (line["method"], line["path"], line["status"], line["reason"]) == ("GET", path, status, reason)
        assert line["seconds"] >= 0
    httpx.post(f"{service.url}/v1/encodings", content=b"abc", headers={"x-request-id": "log-3"})
    line = service.logged("log-3")
    assert (line["tokens"], line["rows"], line["input_bytes"]) == (3, 1, 3)


def test_health_is_another_name_of_livez(service: RunningService) -> None:
    """Where other servers of models have their health check, this one answers as at /livez."""
    health, alive = (httpx.get(f"{service.url}/{name}") for name in ("health", "livez"))
    assert (health.status_code, health.json()) == (200, alive.json())


def test_models_are_listed(service: RunningService) -> None:
    """The list holds the served model, which can be asked for by its id."""
    listed = httpx.get(f"{service.url}/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny"]
    assert httpx.get(f"{service.url}/v1/models/tiny").json() == listed["data"][0]


def test_a_model_has_the_names_that_it_is_given(tmp_path: Path) -> None:
    """It is listed and taken under each of them; the first stands in answers, its folder's name nowhere."""
    with running_service(tmp_path, served_model_name=("org/name", "alias")) as service:
        url = f"{service.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["org/name", "alias"]
            for name in ("org/name", "alias"):
                assert client.models.retrieve(name).id == name
                assert client.completions.create(model=name, prompt="abc").model == "org/name"
                assert client.embeddings.create(model=name, input="abc").model == "org/name"
            with pytest.raises(openai.NotFoundError, match="'org/name' or 'alias' is"):
                client.completions.create(model="tiny", prompt="abc")
        assert httpx.get(f"{service.url}/readyz").json()["model"] == "org/name"


def test_ready_follows_the_engine(tmp_path: Path) -> None:
    """200 with the engine's figures, 503 with its reason; completions are refused meanwhile; alive all the time."""
    engine = FakeEngine()
    with running_service(tmp_path, engine, engine_ready_seconds=0.1) as service:
        assert httpx.get(f"{service.url}/readyz").json()["ranks"] == 1
        engine.ready, engine.reason = False, "rank 2 is stuck in step 40"
        waiting = httpx.get(f"{service.url}/readyz")
        assert waiting.status_code == 503 and "rank 2 is stuck" in waiting.json()["error"]["message"]
        assert waiting.headers["content-type"] == "application/problem+json" and waiting.headers["retry-after"]
        assert httpx.post(f"{service.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{service.url}/livez").status_code == 200
        assert httpx.get(f"{service.url}/v1/models").status_code == 200
        engine.ready, engine.hidden_size = True, 99
        other = httpx.get(f"{service.url}/readyz")
        assert other.status_code == 503 and "same model folder" in other.json()["detail"]


def test_an_engine_that_is_missed_for_long_is_asked_for_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retry-After of a 503 is the time for which the engine has not been ready, up to two minutes."""
    engine, later = FakeEngine(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0])
    monkeypatch.setattr("dist_attn_service.engine.watch.time", clock)
    with running_service(tmp_path, engine) as service:

        def told() -> int:
            return int(httpx.get(f"{service.url}/readyz").headers["retry-after"])

        engine.ready, engine.reason = False, "rank 2 is stuck in step 40"
        first = told()
        later[0] = 50
        assert first < 40 < 50 <= told() < 100
        later[0] = 5_000
        assert told() == 120
        engine.ready = True
        assert httpx.get(f"{service.url}/readyz").status_code == 200
        engine.ready = False
        assert told() < 40


def test_the_documentation_describes_the_routes(service: RunningService) -> None:
    """/docs answers, and the OpenAPI document has the bodies that the routes read by themselves."""
    assert httpx.get(f"{service.url}/docs").status_code == 200
    document = httpx.get(f"{service.url}/openapi.json").json()
    assert {"/v1/completions", "/v1/encodings", "/v1/models", "/livez", "/readyz"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert {"CompletionRequest", "EncodingRequest", "Problem"} <= set(schemas)
    names = [p["name"] for p in document["paths"]["/v1/encodings"]["post"]["parameters"]]
    assert {"granularity", "window", "pooling", "format"} <= set(names)
    answers = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("many", [False, True])
def test_the_head_has_a_size_limit(service: RunningService, many: bool) -> None:
    """One endless header or endlessly many: 431 as soon as the limit is passed, then the connection ends."""
    with service.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        answer = Answer(connection)
        junk = b"X-Junk: abcdefgh\r\n" * 500 if many else b"X-Junk: " + b"a" * 9_000
        try:
            for _ in range(30):
                connection.sendall(junk)
        except OSError:
            pass
        assert answer.read_head() == 431
        assert b'"head_too_large"' in answer.read_body()


@pytest.mark.parametrize("start", [b"", b"GET /livez HT"])
def test_a_head_that_never_ends_is_given_up(tmp_path: Path, start: bytes) -> None:
    """A connection that sends half a head, or nothing, is answered with 408 and closed."""
    with running_service(tmp_path, request_head_seconds=1) as service, service.connect() as connection:
        connection.sendall(start)
        answer = Answer(connection)
        assert answer.read_head() == 408
        assert b'"body_timeout"' in answer.read_body()
        assert answer.at_end()


@pytest.mark.parametrize("nonsense", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_what_is_not_http_gets_a_problem(service: RunningService, nonsense: bytes) -> None:
    """Garbage is answered in the one error shape and the connection is closed."""
    with service.connect() as connection:
        connection.sendall(nonsense)
        answer = Answer(connection)
        assert answer.read_head() == 400
        assert answer.headers["content-type"] == "application/problem+json" and answer.headers["x-request-id"]
        assert b'"bad_http"' in answer.read_body()
        assert answer.at_end()


def test_connections_are_kept(service: RunningService) -> None:
    """Several requests, refused ones among them, go over one connection."""
    with service.connect() as connection:
        for path, status in (("/livez", 200), ("/nothing", 404), ("/v1/models", 200)):
            connection.sendall(head(path, method="GET"))
            answer = Answer(connection)
            assert answer.read_head() == status
            answer.read_body()


@pytest.mark.slow
def test_the_process_answers_while_it_encodes(tmp_path: Path) -> None:
    """/livez is answered again and again while a large document is tokenised and its rows are written."""
    engine = FakeEngine(keep=False)
    answered = 0
    with running_service(tmp_path, engine) as service:
        data = b"call me ishmael " * 200_000

        def encode() -> None:
            answer = httpx.post(f"{service.url}/v1/encodings?granularity=document", content=data, timeout=60)
            assert answer.status_code == 200

        worker = threading.Thread(target=encode)
        worker.start()
        with httpx.Client() as client:
            while worker.is_alive():
                assert client.get(f"{service.url}/livez").status_code == 200
                answered += 1
        worker.join(60)
    assert answered > 20


def test_an_unforeseen_error_is_a_500_with_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is answered with a problem document, logged with its traceback, and harms nobody else."""
    engine = FakeEngine()
    with running_service(tmp_path, engine) as service:
        monkeypatch.setattr(service.engine_port, "health", lambda: 1 / 0)
        failed = httpx.get(f"{service.url}/readyz", headers={"x-request-id": "bug-1"})
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        assert failed.headers["x-request-id"] == "bug-1"
        eventually(
            lambda: any("ZeroDivisionError" in line.get("exception", "") for line in service.log_lines()),
            "the traceback",
        )
        assert httpx.get(f"{service.url}/livez").status_code == 200


def test_each_member_of_a_body_in_gzip_lets_others_run() -> None:
    """Also of members that hold nothing or one byte, thousands of which may arrive at once."""
    members = [gzip.compress(b""), gzip.compress(b"a")] * 500
    turns = 0

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"".join(members), "more_body": False}

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> bytes:
        busy = asyncio.create_task(others())
        body = RequestBody(receive, idle_seconds=60, gzip=True)
        data = b"".join([piece async for piece in body.chunks()])
        busy.cancel()
        return data

    assert asyncio.run(read()) == b"a" * 500
    assert turns >= len(members)
