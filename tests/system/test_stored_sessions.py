"""A session over a real controller and a real rank: stored, and gone on from by an engine that was started afresh."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from dist_attn_service.base.logs import make_log
from dist_attn_service.engine.port import ZmqEnginePort
from dist_attn_service.engine.session_stream import SessionEvent, SessionStream, SessionWork
from dist_attn_service.engine.stream import StreamLimits

from dist_attn.control.launch import start_engine
from dist_attn.wire.messages import Generated, SamplingSpec
from dist_attn.wire.session_messages import BeginState, Checkpoint, Restored, SessionDone
from tests.support.models import write_small_folder

SECONDS = 240
TOKENS = np.random.default_rng(2).integers(0, 200, 2600).astype(np.int32)
SPEC = SamplingSpec(12, temperature=0.8, seed=5, logit_bias={256: -100.0})


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """Bytes as a store gives them."""
    for at in range(0, len(data), 5000):
        yield data[at : at + 5000]


async def go_on(
    port: ZmqEnginePort, work: SessionWork, begin: bytes, tokens: np.ndarray
) -> tuple[list[SessionEvent], dict[int, bytes]]:
    """One piece of work: its events, and the states that came of it by position."""
    events: list[SessionEvent] = []
    states: dict[int, bytes] = {}
    with port.open_session(work) as stream:
        async with asyncio.TaskGroup() as group:
            group.create_task(_send(stream, work, begin, tokens))
            while not events or not isinstance(events[-1], SessionDone):
                events.append(await stream.next())
                if isinstance(event := events[-1], Checkpoint):
                    states[event.position] = b"".join([piece async for piece in stream.snapshot(event)])
    return events, states


async def _send(stream: SessionStream, work: SessionWork, begin: bytes, tokens: np.ndarray) -> None:
    if work.begin is not None:
        await stream.restore(pieces(begin))
    await stream.send(tokens, final=True)


def drawn(events: list[SessionEvent]) -> list[int]:
    """The drawn tokens."""
    return [token for event in events if isinstance(event, Generated) for token in event.tokens]


async def with_engine(model: Path, folder: Path, use) -> object:
    """What `use` makes of a fresh engine."""
    with start_engine(model=str(model), ranks=1, data_dir=str(folder), save_draws=4) as engine:
        port = ZmqEnginePort(engine.api_address, StreamLimits(), make_log(), status_seconds=0.1)
        await port.start()
        try:
            async with asyncio.timeout(SECONDS):
                while not port.health().ready:  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.05)
                return await use(port)
        finally:
            await port.close()


def test_a_fresh_engine_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """No token is read again, and states, logits and drawn tokens are those of an engine that was never stopped."""
    model = write_small_folder(tmp_path / "tiny")

    async def first(port: ZmqEnginePort) -> tuple[dict[int, bytes], list[int], dict[int, bytes]]:
        _, states = await go_on(port, SessionWork(checkpoint_tokens=1024), b"", TOKENS[:2048])
        whole = SessionWork(sampling=SPEC, checkpoint_tokens=1024)
        events, wanted = await go_on(port, whole, b"", TOKENS)
        return states, drawn(events), wanted

    async def second(port: ZmqEnginePort, begin: bytes) -> tuple[list[SessionEvent], dict[int, bytes]]:
        work = SessionWork(BeginState(2048, len(begin)), sampling=SPEC)
        return await go_on(port, work, begin, TOKENS[2048:])

    states, tokens, wanted = asyncio.run(with_engine(model, tmp_path / "a", first))
    assert list(states) == [1024, 2048] and list(wanted) == [1024, 2048, 2612]
    assert states == {at: wanted[at] for at in states}
    events, again = asyncio.run(with_engine(model, tmp_path / "b", lambda port: second(port, states[2048])))
    assert isinstance(events[0], Restored)
    report = events[0].report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact) == (2048, 0, True), report
    assert drawn(events) == tokens and len(tokens) == 12
    assert again == {2612: wanted[2612]}
