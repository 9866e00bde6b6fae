"""A session's work over the engine's port: states in and out in pieces, events in order, in memory and over ZeroMQ."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.engine.port import EnginePort
from dist_attn_service.engine.resending import EngineEvent
from dist_attn_service.engine.stream import EngineStream

from dist_attn.wire.messages import BeginState, Checkpoint, Done, Generated, Restored, SamplingSpec, StatePiece
from tests.service.test_engine_port import run, until
from tests.support.begun import begin_session
from tests.support.fake_engine import FakeEngine
from tests.support.fake_sessions import after, drawn_from, stored

pytestmark = pytest.mark.parametrize("kind", ["memory", "zmq"])
TOKENS = np.arange(3000, dtype=np.int32) * 7 % 250


async def pieces(data: bytes, size: int = 999) -> AsyncIterator[bytes]:
    """Bytes as a store gives them."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def all_of(stream: EngineStream) -> tuple[list[EngineEvent], dict[int, bytes]]:
    """Every event up to the end, and the states by position."""
    events: list[EngineEvent] = []
    states = {}
    while not events or not isinstance(events[-1], Done):
        events.append(await stream.next())
        if isinstance(event := events[-1], Checkpoint):
            states[event.position] = b"".join([piece async for piece in stream.snapshot(event)])
    return events, states


def test_tokens_in_and_states_out(kind: str, tmp_path: Path) -> None:
    """From the empty state: checkpoints on the grid and one at the end, whole and in order."""

    async def use(port: EnginePort) -> None:
        with begin_session(port, checkpoint_tokens=1000) as stream:
            await stream.admitted(5)
            await stream.send(TOKENS, final=True)
            events, states = await all_of(stream)
        assert states == {at: stored(after(0, TOKENS[:at]), at) for at in (1024, 2048, 3000)}
        assert events[-1] == Done(stream.request_id, 3000, 0, 0)

    engine = FakeEngine()
    run(kind, engine, tmp_path, use)
    assert not engine.cancelled


@pytest.mark.parametrize("fed", [0, 10])
def test_drawing_from_a_stored_state(kind: str, tmp_path: Path, fed: int) -> None:
    """A state goes in by pieces, tokens count from its position, and the last state stands after all drawn tokens."""
    begin = stored(after(0, TOKENS[:700]), 700)
    number = after(0, TOKENS[: 700 + fed])
    drawn = drawn_from(number, 5)

    async def use(port: EnginePort) -> None:
        with begin_session(port, BeginState(700, len(begin)), SamplingSpec(5)) as stream:
            await stream.restore(pieces(begin))
            await stream.send(TOKENS[700 : 700 + fed], final=True)
            events, states = await all_of(stream)
        assert isinstance(events[0], Restored) and events[0].report.bit_exact
        assert [t for event in events if isinstance(event, Generated) for t in event.tokens] == drawn
        assert states == {705 + fed: stored(after(number, drawn), 705 + fed)}

    engine = FakeEngine()
    run(kind, engine, tmp_path, use)
    assert max(len(m.data) for m in engine.received if isinstance(m, StatePiece)) <= 999


def test_a_state_that_is_damaged_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    """What the controller says of it comes out of the next call."""
    begin = bytearray(stored(1, 700))
    begin[-1] ^= 1

    async def use(port: EnginePort) -> None:
        with begin_session(port, BeginState(700, len(begin))) as stream:
            await stream.restore(pieces(bytes(begin)))
            with pytest.raises(ServiceError, match="damaged") as refused:
                await stream.next()
        assert (refused.value.code, refused.value.status) == (Code.INVALID_STATE, 400)

    engine = FakeEngine()
    run(kind, engine, tmp_path, use)
    assert not engine.open_count


def test_bytes_that_do_not_come_as_announced_cancel(kind: str, tmp_path: Path) -> None:
    """A store that gives fewer bytes than it said leaves no work behind."""
    begin = stored(1, 700)
    engine = FakeEngine()

    async def use(port: EnginePort) -> None:
        with (
            pytest.raises(ServiceError, match=f"of {len(begin)} bytes was announced, and 5 came"),
            begin_session(port, BeginState(700, len(begin))) as stream,
        ):
            await stream.restore(pieces(begin[:5]))
        await until(lambda: bool(engine.cancelled))

    run(kind, engine, tmp_path, use)
    assert not engine.open_count
