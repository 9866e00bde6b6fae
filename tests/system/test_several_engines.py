"""Two engines behind one API: work is shared, goes on at the other when one is lost, and one may be changed."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from dist_attn.control.launch import EngineHandle, start_engine
from tests.support.models import write_small_folder
from tests.support.service_process import running_process
from tests.support.sessions import SessionClient
from tests.support.streams import Stream
from tests.support.waiting import eventually

SECONDS = 120.0
SESSIONS = 10
TEXT = "It was a dark and stormy night; the rain fell in torrents. "
LONG = (TEXT * 900).encode()
TOKENS = 600
SHORT = {"prompt": TEXT, "max_tokens": 5}
STREAMS = [Stream(f"text {n}", TEXT * (600 + n)) for n in range(3)] + [
    Stream(f"drawn {n}", TEXT * (n + 1), max_tokens=TOKENS) for n in range(3)
]


@dataclass(frozen=True)
class Pair:
    """Two engines and their API."""

    engines: list[EngineHandle]
    client: SessionClient

    def ready(self) -> list[bool]:
        """Which engine is ready, by the API's status."""
        by_address = {one["address"]: one["ready"] for one in self.client.get("/v1/status").json()["engines"]}
        return [by_address[engine.api_address] for engine in self.engines]

    def busy(self) -> list[int]:
        """The requests in each engine, by the gauges of the API."""
        lines = self.client.get("/metrics").text.splitlines()
        return [
            sum(
                int(float(line.split()[-1]))
                for line in lines
                if line.startswith(("dist_attn_engine_active{", "dist_attn_engine_queued{"))
                and f'engine="{engine.api_address}"' in line
            )
            for engine in self.engines
        ]

    def generate(self, session: str, tokens: int) -> str:
        """SHA-256 of what a session goes on with, and of its position."""
        answer = self.client.post(f"/v1/sessions/{session}/generate", json={"max_tokens": tokens, "seed": 5})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        said = json.dumps([body["choices"][0]["text"], body["session"]["position"], body["session"]["bit_exact"]])
        return hashlib.sha256(said.encode()).hexdigest()

    def position(self, session: str) -> int:
        """The position of a session."""
        return int(self.client.get(f"/v1/sessions/{session}").json()["position"])

    def fork(self, session: str) -> str:
        """A session with the same state."""
        return str(self.client.post(f"/v1/sessions/{session}/fork").json()["id"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines of one model over one store, and an API process before both."""
    folder = tmp_path_factory.mktemp("engines")
    model = write_small_folder(folder / "tiny")
    with ExitStack() as until_done:
        engines = [
            until_done.enter_context(
                start_engine(
                    model=str(model),
                    data_dir=str(folder / name),
                    store=str(folder / "data/states"),
                    api_address=f"ipc://{folder}/{name}.ipc",
                    drain_s=60.0,
                )
            )
            for name in ("left", "right")
        ]
        addresses = ",".join(engine.api_address for engine in engines)
        options = {"engine_ready_seconds": "2", "checkpoint_tokens": "4096"}  # appends have states on the way
        options |= {"status_seconds": "0.02"}  # work that a fast machine does between two looks would never be seen
        _, url = until_done.enter_context(running_process(folder, addresses, model, **options))
        yield Pair(engines, SessionClient(url, seconds=SECONDS))


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """Both engines, ready."""
    for engine in shared.engines:
        if engine.exit_code() is not None:
            engine.restart()
    eventually(lambda: shared.ready() == [True, True], "both engines", SECONDS)
    return shared


def digests(pair: Pair, came: "list[threading.Event] | None" = None) -> list[str]:
    """The digests of all streams, asked for together."""

    async def ask() -> list[str]:
        moved = [event.set for event in came or [threading.Event() for _ in STREAMS]]
        async with httpx.AsyncClient(base_url=pair.client.url, timeout=SECONDS) as http:
            return await asyncio.gather(*map(Stream.digest, STREAMS, [http] * len(STREAMS), moved))

    return asyncio.run(ask())


def test_an_engine_is_changed_under_load_and_no_request_fails(pair: Pair) -> None:
    """What drains ends what it has and gets nothing new; it is replaced, and gets work again."""
    done, statuses = threading.Event(), []

    def load() -> None:
        while not done.is_set():
            statuses.append(pair.client.post("/v1/completions", json=SHORT).status_code)
            statuses.append(pair.client.post("/v1/embeddings", json={"input": [TEXT, "b"]}).status_code)

    with ThreadPoolExecutor() as together:
        loading = [together.submit(load) for _ in range(3)]
        eventually(lambda: len(statuses) > 6, "answers", SECONDS)
        pair.engines[1].process.terminate()
        assert pair.engines[1].process.wait(SECONDS) == 0
        before = len(statuses)
        eventually(lambda: len(statuses) > before + 6, "answers of the other", SECONDS)
        pair.engines[1].restart()
        eventually(lambda: pair.ready() == [True, True], "the new one", SECONDS)
        done.set()
        for one in loading:
            one.result(SECONDS)
    assert set(statuses) == {200}


def test_all_goes_on_at_the_other_engine_when_one_is_killed_for_good(pair: Pair) -> None:
    """Rows, drawn texts, an append, a generation and ten sessions have the bits of an undisturbed run; with none ready
    a request waits, but not for ever.
    """
    half_sent, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield LONG[:36_000]
        half_sent.set()
        assert go_on.wait(SECONDS)
        yield LONG[36_000:]

    with ThreadPoolExecutor() as together:
        whole, appended, *sessions = (pair.client.make() for _ in range(SESSIONS + 2))
        for number, session in enumerate(sessions):
            pair.client.append(session, f"{number}: {TEXT}" * 9)
        pair.client.append(whole, LONG)
        wanted = [pair.generate(pair.fork(session), 20) for session in sessions]
        long_wanted, streams_wanted = pair.generate(pair.fork(whole), TOKENS), digests(pair)

        came = [threading.Event() for _ in STREAMS]
        eventually(lambda: pair.busy() == [0, 0], "the end of all work", SECONDS)
        appending = together.submit(pair.client.append, appended, slowly())
        eventually(lambda: sum(pair.busy()) == 1 and pair.position(appended) > 0, "a state on the way", SECONDS)
        lost, left = [pair.busy().index(count) for count in (1, 0)]
        generating = together.submit(pair.generate, pair.fork(whole), TOKENS)
        streaming = together.submit(digests, pair, came)
        assert half_sent.wait(SECONDS) and all(event.wait(SECONDS) for event in came)
        eventually(lambda: min(pair.busy()) >= 2, "work at both engines", SECONDS)
        pair.engines[lost].process.kill()
        eventually(lambda: not pair.ready()[lost], "the loss to be seen", SECONDS)
        go_on.set()
        assert streaming.result(SECONDS) == streams_wanted
        assert generating.result(SECONDS) == long_wanted
        appending.result(SECONDS)
        assert pair.client.state(appended).headers["etag"] == pair.client.state(whole).headers["etag"]
        assert [pair.generate(session, 20) for session in sessions] == wanted
    pair.engines[left].process.kill()
    eventually(lambda: pair.ready() == [False, False], "the loss to be seen", SECONDS)
    refused = pair.client.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_not_ready"
    for engine in pair.engines:
        assert engine.api_address in refused.json()["detail"]
