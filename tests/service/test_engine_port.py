"""One contract for every EnginePort: in memory, and over ZeroMQ to a controller."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.logs import make_log
from dist_attn_service.engine.port import EnginePort, ZmqEnginePort
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.messages import Credit, Done, Generated, Rows, RowSpec, SamplingSpec, Tokens
from tests.support.begun import begin_completion, begin_encoding
from tests.support.fake_engine import FakeEngine, FakeEnginePort, fake_controller, row_vector
from tests.support.waiting import until

SECONDS = 60
LIMITS = StreamLimits(silence_seconds=SECONDS, message_tokens=300)


@asynccontextmanager
async def opened(
    kind: str, engine: FakeEngine, folder: Path, limits: StreamLimits = LIMITS
) -> AsyncIterator[EnginePort]:
    """A started port of that kind, ready to take work."""
    if kind == "memory":
        port: EnginePort = FakeEnginePort(engine, limits)
        await port.start()
        yield port
        await port.close()
        return
    with fake_controller(engine, f"ipc://{folder}/c") as address:
        port = ZmqEnginePort(address, limits, make_log(), status_seconds=0.05)
        await port.start()
        await until(lambda: port.health().status is not None)
        yield port
        await port.close()


def run(kind: str, engine: FakeEngine, folder: Path, use: Callable[[EnginePort], object], **limits: float) -> None:
    """Run one scenario against a port."""

    async def scenario() -> None:
        chosen = StreamLimits(**{"silence_seconds": SECONDS, "message_tokens": 300, **limits})  # type: ignore[arg-type]
        async with asyncio.timeout(SECONDS), opened(kind, engine, folder, chosen) as port:
            await use(port)  # type: ignore[misc]

    asyncio.run(scenario())


async def rows_of(stream: EngineStream) -> tuple[list[Rows], Done]:
    """Everything an encoding returns."""
    rows = []
    while isinstance(event := await stream.next(), Rows):
        rows.append(event)
    assert isinstance(event, Done)
    return rows, event


pytestmark = pytest.mark.parametrize("kind", ["memory", "zmq"])


def test_an_encoding_goes_out_by_credit_and_comes_back_in_order(kind: str, tmp_path: Path) -> None:
    """Tokens never pass the credit, are cut into messages, and the rows are those of the tokens."""
    engine = FakeEngine(credit=1000)
    tokens = np.arange(5_555, dtype=np.int32) % 251

    async def use(port: EnginePort) -> None:
        with begin_encoding(port, RowSpec(window=100)) as stream:
            await stream.admitted(SECONDS)
            async with asyncio.TaskGroup() as group:
                group.create_task(stream.send(tokens, final=True))
                rows, done = await rows_of(stream)
        assert (done.position, done.rows) == (5_555, 56)
        got = np.concatenate([np.frombuffer(r.vectors, "<f4").reshape(-1, 8) for r in rows])
        wanted = np.stack([row_vector(tokens[i : i + 100], "mean") for i in range(0, 5_555, 100)])
        np.testing.assert_array_equal(got, wanted)
        sizes = [len(m.tokens) // 4 for m in engine.received if isinstance(m, Tokens)]
        assert max(sizes) <= 300 and sum(sizes) == 5_555
        assert not engine.cancelled and engine.open_count == 0

    run(kind, engine, tmp_path, use)


def test_a_completion_ends_with_its_reason(kind: str, tmp_path: Path) -> None:
    """Drawn tokens arrive in order, the reason with the last."""

    async def use(port: EnginePort) -> None:
        with begin_completion(port, SamplingSpec(max_tokens=5)) as stream:
            await stream.send(np.array([7, 8], dtype=np.int32), final=True)
            events = [await stream.next() for _ in range(5)]
        assert all(isinstance(event, Generated) for event in events)
        assert [(e.tokens, e.finish_reason) for e in events if isinstance(e, Generated)] == [
            ([7], None), ([8], None), ([7], None), ([8], None), ([7], "length")
        ]  # fmt: skip

    run(kind, FakeEngine(), tmp_path, use)


def test_leaving_early_cancels(kind: str, tmp_path: Path) -> None:
    """Leaving the stream before its end tells the controller; after the end it does not."""
    engine = FakeEngine()

    async def use(port: EnginePort) -> None:
        with begin_encoding(port) as stream:
            await stream.admitted(SECONDS)
            await stream.send(np.zeros(10, dtype=np.int32), final=False)
        await until(lambda: engine.cancelled == [stream.request_id])
        assert engine.open_count == 0

    run(kind, engine, tmp_path, use)


def test_a_failure_is_raised_wherever_the_request_waits(kind: str, tmp_path: Path) -> None:
    """A Failed message ends admission, sending and receiving with its code."""
    engine = FakeEngine(credit=100, fail_at=250)

    async def use(port: EnginePort) -> None:
        with begin_encoding(port, RowSpec(granularity="document")) as stream:
            with pytest.raises(ServiceError, match="rank 1 died") as failed:
                await stream.send(np.zeros(1_000, dtype=np.int32), final=True)
            assert failed.value.code == Code.ENGINE_FAILED
            with pytest.raises(ServiceError, match="rank 1 died"):
                await stream.next()
        engine.refuse = "overloaded"
        with begin_encoding(port) as stream, pytest.raises(ServiceError) as refused:
            await stream.admitted(SECONDS)
        assert refused.value.status == 429

    run(kind, engine, tmp_path, use)


def test_a_request_that_was_not_taken_yet_ends_with_the_connection(kind: str, tmp_path: Path) -> None:
    """When the port lets go, a request that waits to be admitted hears that at once, not at its own deadline."""
    engine = FakeEngine(mute=True)

    async def use(port: EnginePort) -> None:
        with begin_encoding(port) as stream:
            waiting = asyncio.ensure_future(stream.admitted(10 * SECONDS))
            await until(lambda: bool(engine.received))
            await port.close()
            with pytest.raises(ServiceError, match="stopping") as failed:
                await waiting
            assert failed.value.code == Code.STOPPING

    run(kind, engine, tmp_path, use)


def test_silence_has_a_deadline(kind: str, tmp_path: Path) -> None:
    """An engine that stops answering fails admission, the wait for credit, and the wait for results."""
    engine = FakeEngine(credit=10, mute=True)

    async def use(port: EnginePort) -> None:
        with begin_encoding(port) as stream, pytest.raises(ServiceError) as silent:
            await stream.admitted(0.1)
        assert silent.value.code == Code.ENGINE_UNREACHABLE
        engine.mute = False
        with begin_encoding(port) as stream:
            await stream.admitted(SECONDS)
            engine.paused = True
            with pytest.raises(ServiceError) as stuck:
                await stream.send(np.zeros(1_000, dtype=np.int32), final=True)
        assert (stuck.value.code, stuck.value.status) == (Code.ENGINE_TIMEOUT, 504)
        engine.paused, engine.hold_replies = False, True
        with begin_completion(port, SamplingSpec(max_tokens=3)) as stream:
            await stream.admitted(SECONDS)  # with credit: to wait for that is bounded by the silence as well
            await stream.send(np.zeros(4, dtype=np.int32), final=True)
            with pytest.raises(ServiceError) as quiet:
                await stream.next()
        assert quiet.value.code == Code.ENGINE_TIMEOUT

    run(kind, engine, tmp_path, use, silence_seconds=0.3)


def test_a_repeated_credit_is_no_progress(kind: str, tmp_path: Path) -> None:
    """A controller that only looks whether the API is still there does not put the deadline off."""
    engine = FakeEngine(credit=10)

    async def use(port: EnginePort) -> None:
        with begin_encoding(port) as stream:
            await stream.admitted(SECONDS)
            engine.paused = True
            sending = asyncio.ensure_future(stream.send(np.zeros(100, dtype=np.int32), final=True))
            while not sending.done():
                stream.deliver(Credit(request_id=stream.request_id, upto=10))
                await asyncio.sleep(0.05)
            with pytest.raises(ServiceError, match="no progress"):
                await sending

    run(kind, engine, tmp_path, use, silence_seconds=0.3)


def test_a_slow_sender_is_not_silence(kind: str, tmp_path: Path) -> None:
    """While the input is not complete the engine owes nothing: waiting for rows has no deadline of its own."""

    async def use(port: EnginePort) -> None:
        with begin_encoding(port, RowSpec(window=4)) as stream:
            await stream.admitted(SECONDS)
            waiting = asyncio.ensure_future(stream.next())
            done, _ = await asyncio.wait({waiting}, timeout=0.6)
            assert not done
            await stream.send(np.zeros(4, dtype=np.int32), final=False)
            assert isinstance(await waiting, Rows)

    run(kind, FakeEngine(), tmp_path, use, silence_seconds=0.3)


def test_rows_that_pile_up_stop_the_feeding(kind: str, tmp_path: Path) -> None:
    """When nobody takes the rows, sending waits; over the hard bound the request fails instead of growing."""
    engine = FakeEngine(credit=100)

    async def use(port: EnginePort) -> None:
        with begin_encoding(port, RowSpec(granularity="token")) as stream:
            sending = asyncio.ensure_future(stream.send(np.zeros(5_000, dtype=np.int32), final=True))
            await until(lambda: stream._inbox.bytes >= 6_400)
            await asyncio.sleep(0.05)
            assert stream._inbox.bytes < 6_400 + 2 * 100 * 32
            rows, _ = await rows_of(stream)
            await sending
            assert sum(len(r.starts) for r in rows) == 5_000

    run(kind, engine, tmp_path, use, inbox_soft_bytes=6_400)

    async def overflow(port: EnginePort) -> None:
        with (
            begin_encoding(port, RowSpec(granularity="token")) as stream,
            pytest.raises(ServiceError, match="wait in memory"),
        ):
            await stream.send(np.zeros(5_000, dtype=np.int32), final=True)
            while True:
                await stream.next()

    run(kind, engine, tmp_path, overflow, inbox_hard_bytes=1_000)


def test_rows_out_of_order_are_refused(kind: str, tmp_path: Path) -> None:
    """A gap in the rows is an error, never a silent loss."""
    engine = FakeEngine()

    async def use(port: EnginePort) -> None:
        with begin_encoding(port, RowSpec(window=10)) as stream:
            await stream.admitted(SECONDS)
            stray = Rows(request_id=stream.request_id, first_row=3, starts=[0], stops=[10], vectors=bytes(32))
            stream.deliver(stray)
            with pytest.raises(ServiceError, match="row 0 was due"):
                await stream.next()

    run(kind, engine, tmp_path, use)


def test_health_says_what_is_wrong(kind: str, tmp_path: Path) -> None:
    """Ready follows the engine, with the engine's reason."""
    engine = FakeEngine()

    async def use(port: EnginePort) -> None:
        assert port.health().ready
        engine.ready, engine.reason = False, "rank 2 is stuck in step 40"
        await until(lambda: not port.health().ready)
        assert "rank 2" in port.health().reason

    run(kind, engine, tmp_path, use)
