"""The example configuration of nginx, really run before two replicas: what streams through it, and what is refused."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dist_attn.settings import Settings
from dist_attn.wire.messages import Cancel, Generated
from tests.support.fake_engine import FakeEngine
from tests.support.programs import Program, free_port, running_program
from tests.support.raw_http import CHUNKED, LAST_CHUNK, TEXT, Answer, chunk, head, lines_of
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

FILE = Path(__file__).resolve().parents[2] / "deploy/nginx/nginx.conf"
ROUTE = "/v1/encodings"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/sbin:/bin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx")


@dataclass(frozen=True)
class Front:
    """A running nginx and the replicas behind it."""

    proxy: RunningService  # the first replica with nginx's port: where a client connects
    replicas: list[RunningService]
    program: Program

    def owner(self, *, open_requests: int = 1) -> RunningService:
        """The replica that has so many requests in its engine, once there is one."""
        eventually(lambda: bool(self._busy(open_requests)), "a replica with the request")
        return self._busy(open_requests)[0]

    def _busy(self, count: int) -> list[RunningService]:
        return [replica for replica in self.replicas if replica.engine.open_count == count]


def configuration(folder: Path, port: int, upstreams: list[int]) -> str:
    """The example with other ports, one worker, and its files in `folder`; every place is replaced exactly once."""
    text = FILE.read_text()
    places = {"api-1:8000": f"127.0.0.1:{upstreams[0]}", "api-2:8000": f"127.0.0.1:{upstreams[1]}"}
    places |= {"listen 8080;": f"listen 127.0.0.1:{port};", "worker_processes auto;": "worker_processes 1;"}
    for old, new in places.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text.replace("/tmp/", f"{folder}/")


@contextmanager
def front_of(folder: Path, replicas: list[RunningService]) -> Iterator[Front]:
    """nginx with the example configuration before these replicas."""
    port, place = free_port(), folder / "nginx.conf"
    place.write_text(configuration(folder, port, [replica.port for replica in replicas]))
    command = [str(NGINX), "-e", "stderr", "-g", "daemon off;", "-c", str(place)]
    proxy = RunningService(port, replicas[0].engine, replicas[0].engine_port, replicas[0].settings, replicas[0].log)
    with running_program(command, folder / "nginx.log") as program:
        eventually(lambda: program.process.poll() is not None or answers(proxy), "nginx to listen")
        assert program.process.poll() is None, program.output
        yield Front(proxy, replicas, program)
        assert program.stop() == 0, program.output


def answers(service: RunningService) -> bool:
    """Whether somebody listens there."""
    try:
        service.connect().close()
    except OSError:
        return False
    return True


def replica(folder: Path, name: str) -> AbstractContextManager[RunningService]:
    """One replica, whose completions wait for what a test draws for them."""
    return running_service(folder / name, FakeEngine(hold_replies=True))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """nginx and two replicas."""
    folder = tmp_path_factory.mktemp("nginx")
    with (
        replica(folder, "a") as first,
        replica(folder, "b") as second,
        front_of(folder, [first, second]) as running,
    ):
        yield running


def value_of(directive: str) -> str:
    """The one value that the example gives a directive."""
    (value,) = set(re.findall(rf"^\s*{directive}\s+([^;]+);", FILE.read_text(), re.MULTILINE))
    return str(value)


def test_its_deadlines_are_longer_than_the_apis() -> None:
    """Whoever waits too long hears so from the API; only idle connections nginx lets go first."""
    waits = Settings().waits
    assert float(value_of("client_body_timeout")[:-1]) > waits.body_idle_seconds
    assert float(value_of("send_timeout")[:-1]) > waits.client_stall_seconds
    assert float(value_of("proxy_read_timeout")[:-1]) > max(waits.engine_silence_seconds, waits.ping_seconds)
    assert float(value_of("proxy_send_timeout")[:-1]) > waits.body_idle_seconds
    assert float(value_of("keepalive_timeout")[:-1]) < waits.keep_alive_seconds
    assert value_of("client_max_body_size") == "0"


@needs_nginx
def test_rows_arrive_while_the_upload_goes_on(front: Front) -> None:
    """Each row comes before the next piece of the document is sent: neither direction is collected."""
    with front.proxy.connect() as connection:
        connection.sendall(head(ROUTE + "?window=16", TEXT, CHUNKED))
        answer, body = Answer(connection), b""
        for piece in range(12):
            connection.sendall(chunk(b"abcdefghijklmnop"))
            if piece == 0:
                assert answer.read_head() == 200
            body += answer.read_chunk()
            assert body.count(b"\n") == piece + 1
        connection.sendall(LAST_CHUNK)
        body += answer.read_body()
    assert lines_of(body)[-1]["tokens"] == 12 * 16


@needs_nginx
def test_events_arrive_one_by_one(front: Front) -> None:
    """A token that the engine draws reaches the client before the next is drawn."""
    question = {"prompt": "hi", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{front.proxy.url}/v1/completions", json=question, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        owner = front.owner()
        (name,) = owner.engine.open_ids
        texts = []
        for number, letter in enumerate(b"abc"):
            owner.engine_port.inject(Generated(name, [letter], "length" if number == 2 else None))
            texts.append(next(events)["choices"][0]["text"])
        owner.engine.handle(Cancel(name))
    assert texts == ["a", "b", "c"]


@needs_nginx
def test_a_client_that_waits_for_the_go_ahead_gets_it(front: Front) -> None:
    """`Expect: 100-continue`, as curl sends it with large files, is answered before the body."""
    with front.proxy.connect() as connection:
        connection.settimeout(5)
        connection.sendall(head(ROUTE, TEXT, "Content-Length: 600", "Expect: 100-continue"))
        answer = Answer(connection)
        assert answer.read_head() == 100
        connection.sendall(b"x" * 600)
        assert answer.read_head() == 200
        assert lines_of(answer.read_body())[-1]["tokens"] == 600


@needs_nginx
def test_a_large_body_passes(front: Front) -> None:
    """A document above nginx's own limits and buffers arrives whole, with every row of it."""
    data = b"0123456789abcdef" * (5 << 14)
    answer = httpx.post(f"{front.proxy.url}{ROUTE}?window=4096", content=data, timeout=60)
    assert answer.status_code == 200
    *rows, summary = lines_of(answer.content)
    assert summary["tokens"] == len(data) > 1 << 20
    assert len(rows) == len(data) // 4096


@needs_nginx
def test_a_client_that_leaves_stops_the_work(front: Front) -> None:
    """A closed connection reaches the engine as a cancel, through nginx too."""
    with front.proxy.connect() as connection:
        connection.sendall(head(ROUTE + "?window=16", TEXT, CHUNKED) + chunk(b"x" * 16))
        owner = front.owner()
        (name,) = owner.engine.open_ids
    eventually(lambda: name in owner.engine.cancelled, "the cancel")
    assert owner.engine.open_count == 0


@needs_nginx
def test_refusals_are_the_apis_own(front: Front) -> None:
    """An error of the API passes as it is; only /metrics is not for this side."""
    refused = httpx.post(f"{front.proxy.url}{ROUTE}?window=0", content=b"x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert httpx.get(f"{front.proxy.url}/readyz").json()["model"] == "tiny"
    assert httpx.get(f"{front.proxy.url}/metrics").status_code == 404
    assert httpx.get(f"{front.replicas[0].url}/metrics").status_code == 200


@needs_nginx
def test_a_replica_that_stops_is_taken_out(tmp_path: Path) -> None:
    """Both replicas work; when one stops no request fails, and when both have, clients are told to try again."""
    with ExitStack() as one, ExitStack() as other, ExitStack() as proxy:
        first, second = one.enter_context(replica(tmp_path, "a")), other.enter_context(replica(tmp_path, "b"))
        front = proxy.enter_context(front_of(tmp_path, [first, second]))
        assert {encode(front).status_code for _ in range(4)} == {200}
        assert first.engine.received
        before = len(second.engine.received)
        assert before
        one.close()
        assert [encode(front).status_code for _ in range(6)] == [200] * 6
        assert len(second.engine.received) > before
        other.close()
        answer = encode(front)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "engine_unreachable"


@needs_nginx
def test_a_replica_that_drains_costs_no_error(tmp_path: Path) -> None:
    """While one replica waits for the end of its open document, all that comes goes to the other."""
    with ExitStack() as one, replica(tmp_path, "b") as second, ExitStack() as proxy:
        first = one.enter_context(running_service(tmp_path / "a", shutdown_seconds=60))
        front = proxy.enter_context(front_of(tmp_path, [first, second]))
        with first.connect() as connection:
            connection.sendall(head(ROUTE, TEXT, "Content-Length: 600") + b"x" * 300)
            answer = Answer(connection)
            assert answer.read_head() == 200
            assert {encode(front).status_code for _ in range(4)} == {200}
            first.stop()
            eventually(lambda: not answers(first), "the first replica to listen no more")
            assert [encode(front).status_code for _ in range(20)] == [200] * 20
            connection.sendall(b"x" * 300)
            assert lines_of(answer.read_body())[-1]["tokens"] == 600


def encode(front: Front) -> httpx.Response:
    """One small document over a connection of its own."""
    return httpx.post(f"{front.proxy.url}{ROUTE}", content=b"x" * 600, timeout=60)
