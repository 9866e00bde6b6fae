"""While the engine restarts, new requests wait: not for ever, and not too many."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from dist_attn_service.base.logs import make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.engine.port import ZmqEnginePort
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import StreamLimits
from dist_attn_service.engine.watch import EngineWatch

from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.raw_http import TEXT, Answer, head, lines_of
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

BODY = {"prompt": "abc", "max_tokens": 3}


class Asked(threading.Thread):
    """A request in a thread, and its answer."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        self._url, self._options = url, options
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        """Send it."""
        self.answer = httpx.post(self._url, timeout=60, **self._options)

    def result(self) -> httpx.Response:
        """Wait for the answer."""
        self.join(60)
        assert self.answer is not None
        return self.answer


def wait_for(service: RunningService, count: int) -> None:
    """Wait until so many requests wait for the engine."""
    eventually(
        lambda: httpx.get(f"{service.url}/v1/status").json()["waiting_requests"] == count, f"{count} waiting requests"
    )


def test_requests_go_on_when_the_engine_is_back(tmp_path: Path) -> None:
    """Every kind of request that came during the restart is answered as if nothing had been."""
    engine = FakeEngine(ready=False, reason="the ranks are being started again")
    with running_service(tmp_path, engine) as service:
        asked = [
            Asked(f"{service.url}/v1/completions", json=BODY),
            Asked(f"{service.url}/v1/completions", json={**BODY, "stream": True}),
            Asked(f"{service.url}/v1/embeddings", json={"input": ["a", "b"]}),
            Asked(f"{service.url}/v1/encodings", content=b"abc" * 1000),
        ]
        wait_for(service, 4)
        assert httpx.get(f"{service.url}/readyz").status_code == 503
        engine.ready = True
        assert [one.result().status_code for one in asked] == [200] * 4
        assert asked[1].result().text.endswith("data: [DONE]\n\n")
        wait_for(service, 0)


def test_a_document_is_taken_meanwhile(tmp_path: Path) -> None:
    """The upload goes on into its spool while the engine is away, and its rows come afterwards."""
    engine = FakeEngine(ready=False)
    size = 3_000_000
    with running_service(tmp_path, engine, spool_memory_bytes=1000) as service, service.connect() as connection:
        connection.sendall(head("/v1/encodings?granularity=document", TEXT, f"Content-Length: {size}") + b"x" * size)
        eventually(
            lambda: httpx.get(f"{service.url}/v1/status").json()["spool_bytes"] > size - 600_000, "the whole upload"
        )
        engine.ready = True
        answer = Answer(connection)
        assert answer.read_head() == 200
        assert lines_of(answer.read_body())[-1]["tokens"] == size


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    """After the deadline the answer is 503 with the engine's reason and Retry-After."""
    engine = FakeEngine(ready=False, reason="rank 3 is starting")
    with running_service(tmp_path, engine, engine_ready_seconds=0.2) as service:
        began = time.monotonic()
        refused = httpx.post(f"{service.url}/v1/completions", json={**BODY, "stream": True})
        assert time.monotonic() - began >= 0.2
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_not_ready"
        assert "rank 3 is starting" in refused.json()["detail"] and "0.2 s" in refused.json()["detail"]


def test_only_so_many_wait(tmp_path: Path) -> None:
    """One more than the limit is refused at once, and those that wait are not disturbed."""
    engine = FakeEngine(ready=False)
    with running_service(tmp_path, engine, waiting_requests=1) as service:
        first = Asked(f"{service.url}/v1/completions", json=BODY)
        wait_for(service, 1)
        refused = httpx.post(f"{service.url}/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 503 and "1 requests wait" in refused.json()["detail"]
        engine.ready = True
        assert first.result().status_code == 200


def test_an_engine_with_another_model_is_not_waited_for(tmp_path: Path) -> None:
    """It will not become the right one, so the answer comes at once."""
    engine = FakeEngine(hidden_size=99)
    with running_service(tmp_path, engine, engine_ready_seconds=60) as service:
        refused = httpx.post(f"{service.url}/v1/completions", json=BODY, timeout=60)
        assert refused.status_code == 503 and "same model folder" in refused.json()["detail"]


def test_a_controller_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    """Over the real socket too: a request that is there before the controller is answered by it."""

    async def scenario() -> None:
        model = model_folder(tmp_path)
        address = f"ipc://{tmp_path}/c"
        settings = Settings(api_address=address, model=model, engine_ready_seconds=20)
        port = ZmqEnginePort(address, StreamLimits(), make_log(), status_seconds=0.05)
        watch = EngineWatch(port, ServedModel.read(model), settings)
        await port.start()
        waiting = asyncio.create_task(watch.until_ready())
        try:
            async with asyncio.timeout(20):
                while watch.waiting == 0:  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
                assert not watch.health().ready
                with fake_controller(FakeEngine(), address):
                    await waiting
                    assert watch.health().ready
        finally:
            await port.close()

    asyncio.run(scenario())
