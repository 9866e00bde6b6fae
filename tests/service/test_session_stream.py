"""A session's work over the engine's port: states in and out by name, events in order, in memory and over ZeroMQ."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.engine.port import EnginePort
from dist_attn_service.engine.resending import MOST_STATES, EngineEvent
from dist_attn_service.engine.stream import EngineStream

from dist_attn.wire.messages import BeginState, Checkpoint, Done, Generated, Restored, SamplingSpec
from tests.service.test_engine_port import run, until
from tests.support.begun import begin_session
from tests.support.fake_engine import FakeEngine
from tests.support.fake_sessions import GRID, SESSION_CREDIT, after, drawn_from, stored

pytestmark = pytest.mark.parametrize("kind", ["memory", "zmq"])
TOKENS = np.arange(3000, dtype=np.int32) * 7 % 250


async def all_of(stream: EngineStream, engine: FakeEngine) -> tuple[list[EngineEvent], dict[int, bytes]]:
    """Every event up to the end, and the states by position."""
    events: list[EngineEvent] = []
    states = {}
    while not events or not isinstance(events[-1], Done):
        events.append(await stream.next())
        if isinstance(event := events[-1], Checkpoint):
            states[event.position] = engine.store.blobs[event.blob]
    return events, states


def test_tokens_in_and_states_out(kind: str, tmp_path: Path) -> None:
    """From the empty state: checkpoints on the grid and one at the end, whole and in order."""
    engine = FakeEngine()

    async def use(port: EnginePort) -> None:
        with begin_session(port, checkpoint_tokens=1000) as stream:
            await stream.admitted(5)
            await stream.send(TOKENS, final=True)
            events, states = await all_of(stream, engine)
        assert states == {at: stored(after(0, TOKENS[:at]), at) for at in (1024, 2048, 3000)}
        assert events[-1] == Done(stream.request_id, 3000, 0, 0)

    run(kind, engine, tmp_path, use)
    assert not engine.cancelled


@pytest.mark.parametrize("fed", [0, 10])
def test_drawing_from_a_stored_state(kind: str, tmp_path: Path, fed: int) -> None:
    """A state goes in by name, tokens count from its position, and the last state stands after all drawn tokens."""
    engine = FakeEngine()
    begin = BeginState(700, *engine.store.put(stored(after(0, TOKENS[:700]), 700)))
    number = after(0, TOKENS[: 700 + fed])
    drawn = drawn_from(number, 5)

    async def use(port: EnginePort) -> None:
        with begin_session(port, begin, SamplingSpec(5)) as stream:
            await stream.restored()
            await stream.send(TOKENS[700 : 700 + fed], final=True)
            events, states = await all_of(stream, engine)
        assert isinstance(events[0], Restored) and events[0].report.bit_exact
        assert [t for event in events if isinstance(event, Generated) for t in event.tokens] == drawn
        assert states == {705 + fed: stored(after(number, drawn), 705 + fed)}

    run(kind, engine, tmp_path, use)


def test_a_state_that_is_damaged_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    """What the controller says of it comes out of the next call."""
    data = bytearray(stored(1, 700))
    data[-1] ^= 1
    engine = FakeEngine()
    begin = BeginState(700, *engine.store.put(bytes(data)))

    async def use(port: EnginePort) -> None:
        with begin_session(port, begin) as stream, pytest.raises(ServiceError, match="damaged") as refused:
            await stream.restored()
        assert (refused.value.code, refused.value.status) == (Code.INVALID_STATE, 400)

    run(kind, engine, tmp_path, use)
    assert not engine.open_count


def test_no_tokens_are_sent_while_states_wait_to_be_recorded(kind: str, tmp_path: Path) -> None:
    """Who records states more slowly than the engine stores them is not sent more and more of them."""
    engine, at_once, rounds = FakeEngine(), SESSION_CREDIT // GRID, 6

    async def use(port: EnginePort) -> None:
        with begin_session(port, checkpoint_tokens=GRID) as stream:
            sending = asyncio.create_task(stream.send(np.resize(TOKENS, rounds * SESSION_CREDIT), final=True))
            await until(lambda: len(engine.store.blobs) >= at_once)
            await asyncio.sleep(0.1)
            # What is under way when the first of them are heard of is a round's more.
            assert len(engine.store.blobs) <= 2 * at_once and not sending.done()
            for taken in range(1, rounds * at_once + 1):
                assert isinstance(await stream.next(), Checkpoint)
                assert len(engine.store.blobs) <= taken + 2 * at_once + MOST_STATES
            await sending
            assert isinstance(await stream.next(), Done)

    run(kind, engine, tmp_path, use)


def test_the_states_of_a_session_that_was_left_are_deleted(kind: str, tmp_path: Path) -> None:
    """Those that wait, and those that the engine was storing, but for the one that was taken."""
    engine, deleted, taken = FakeEngine(), set(), set()

    async def use(port: EnginePort) -> None:
        async def delete(blob: str) -> None:
            deleted.add(blob)

        port.discard_with(delete)
        with begin_session(port, checkpoint_tokens=1000) as stream:
            await stream.send(TOKENS, final=True)
            event = await stream.next()
            assert isinstance(event, Checkpoint)
            taken.add(event.blob)
        await until(lambda: deleted | taken == set(engine.store.blobs) and len(deleted) == 2)

    run(kind, engine, tmp_path, use)
    assert not deleted & taken
