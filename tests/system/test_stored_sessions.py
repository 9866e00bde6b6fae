"""A session over a real controller and a real rank: stored, and gone on from by an engine that was started afresh."""

import asyncio
from pathlib import Path

import numpy as np
from dist_attn_service.base.logs import make_log
from dist_attn_service.engine.port import ZmqEnginePort
from dist_attn_service.engine.resending import EngineEvent
from dist_attn_service.engine.stream import StreamLimits

from dist_attn.control.launch import start_engine
from dist_attn.wire.messages import BeginState, Checkpoint, Done, Generated, Restored, SamplingSpec
from tests.support.begun import begin_session
from tests.support.fake_store import FakeStore
from tests.support.models import write_small_folder

SECONDS = 240
TOKENS = np.random.default_rng(2).integers(0, 200, 2600).astype(np.int32)
SPEC = SamplingSpec(12, temperature=0.8, seed=5, logit_bias={256: -100.0})


async def go_on(
    port: ZmqEnginePort,
    store: FakeStore,
    tokens: np.ndarray,
    begin: bytes = b"",
    sampling: SamplingSpec | None = None,
    checkpoint_tokens: int = 0,
) -> tuple[list[EngineEvent], dict[int, bytes]]:
    """One piece of work: its events, and the states that came of it by position."""
    events: list[EngineEvent] = []
    states: dict[int, bytes] = {}
    state = BeginState(2048, *store.put(begin)) if begin else None
    with begin_session(port, state, sampling, checkpoint_tokens) as stream:
        async with asyncio.TaskGroup() as group:
            group.create_task(stream.send(tokens, final=True))
            while not events or not isinstance(events[-1], Done):
                events.append(await stream.next())
                if isinstance(event := events[-1], Checkpoint):
                    states[event.position] = store.read(event.blob)
    return events, states


def drawn(events: list[EngineEvent]) -> list[int]:
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
                return await use(port, FakeStore(str(folder / "states")))
        finally:
            await port.close()


def test_a_fresh_engine_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """No token is read again, and states, logits and drawn tokens are those of an engine that was never stopped."""
    model = write_small_folder(tmp_path / "tiny")

    async def first(port: ZmqEnginePort, store: FakeStore) -> tuple[dict[int, bytes], list[int], dict[int, bytes]]:
        _, states = await go_on(port, store, TOKENS[:2048], checkpoint_tokens=1024)
        events, wanted = await go_on(port, store, TOKENS, sampling=SPEC, checkpoint_tokens=1024)
        return states, drawn(events), wanted

    async def second(port: ZmqEnginePort, store: FakeStore) -> tuple[list[EngineEvent], dict[int, bytes]]:
        return await go_on(port, store, TOKENS[2048:], states[2048], SPEC)

    states, tokens, wanted = asyncio.run(with_engine(model, tmp_path / "a", first))
    assert list(states) == [1024, 2048] and list(wanted) == [1024, 2048, 2612]
    assert states == {at: wanted[at] for at in states}
    events, again = asyncio.run(with_engine(model, tmp_path / "b", second))
    assert isinstance(events[0], Restored)
    report = events[0].report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact) == (2048, 0, True), report
    assert drawn(events) == tokens and len(tokens) == 12
    assert again == {2612: wanted[2612]}
