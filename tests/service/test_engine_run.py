"""One request's work in the engine: what comes of it is handed on in order, and what does not fit ends it."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from dist_attn_service.base.errors import Code, EngineFailure
from dist_attn_service.engine.port import OpenStreams
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.messages import (
    AnyMessage,
    Cancel,
    Checkpoint,
    Credit,
    Done,
    Generated,
    Progress,
    Rows,
    RowSpec,
    SamplingSpec,
    Tokens,
)
from tests.support.begun import begin_completion, begin_encoding, begin_session

SECONDS = 60
TOKENS = np.arange(5, dtype=np.int32)


def rows_of(name: str, count: int) -> Rows:
    """So many rows of one number each."""
    return Rows(name, 0, [*range(count)], [*range(1, count + 1)], bytes(4 * count))


async def taken(_: object) -> None:
    """Takes what comes."""


def run(
    begin: Callable[[OpenStreams, Callable[[AnyMessage], None]], EngineStream],
    answers: Callable[[str, AnyMessage], list[AnyMessage]],
    use: Callable[[EngineStream], Awaitable[None]],
) -> None:
    """One request whose messages are answered at once."""

    async def scenario() -> None:
        streams, loop = OpenStreams(StreamLimits()), asyncio.get_running_loop()

        def post(message: AnyMessage) -> None:
            for answer in answers(getattr(message, "request_id", ""), message):
                loop.call_soon(streams.route, answer)

        with begin(streams, post) as stream:
            streams.route(Credit(stream.request_id, 1000))
            async with asyncio.timeout(SECONDS):
                await use(stream)

    asyncio.run(scenario())


def encoding(streams: OpenStreams, post: Callable[[AnyMessage], None]) -> EngineStream:
    """An encoding of a row for each token."""
    return begin_encoding(streams, RowSpec("token"), post=post)


@pytest.mark.parametrize(("tokens", "rows"), [(4, 5), (5, 4), (6, 5)])
def test_an_engine_that_counts_otherwise_is_an_error(tokens: int, rows: int) -> None:
    """An answer is whole only if the engine read as many tokens and made as many rows as went through this process."""

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        ended = isinstance(message, Tokens) and message.final
        return [rows_of(name, 5), Done(name, tokens, 0, rows)] if ended else []

    async def use(stream: EngineStream) -> None:
        with pytest.raises(EngineFailure, match=f"counted {tokens} tokens and {rows} rows where 5 and 5"):
            await EngineRun(stream, taken).work(TOKENS)

    run(encoding, answers, use)


def test_what_nobody_asked_for_is_an_error() -> None:
    """Tokens that are drawn for an encoding end it in words."""

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        return [Generated(name, [1])] if isinstance(message, Tokens) else []

    async def use(stream: EngineStream) -> None:
        with pytest.raises(EngineFailure, match="tokens up to 5, the last, with Generated"):
            await EngineRun(stream, taken).work(TOKENS)

    run(encoding, answers, use)


def test_a_state_is_recorded_before_anything_else_comes() -> None:
    """The end follows the last state."""
    at = []

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        ended = isinstance(message, Tokens) and message.final
        return [Checkpoint(name, 5, 0, "00", "00", 200), Done(name, 5, 0, 0)] if ended else []

    async def use(stream: EngineStream) -> None:
        async def on_state(state: Checkpoint) -> None:
            at.append((state.position, state.blob, engine.ends_at(state.position)))
            assert engine.kept is None

        engine = EngineRun(stream, on_state=on_state)
        await engine.work(TOKENS)
        assert engine.kept == 5

    run(lambda streams, post: begin_session(streams, post=post), answers, use)
    assert at == [(5, "00", True)]


def test_an_end_without_its_state_is_an_error() -> None:
    """A session whose last state has not come is not done."""

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        return [Done(name, 5, 0, 0)] if isinstance(message, Tokens) else []

    async def on_state(_: Checkpoint) -> None:
        raise AssertionError

    async def use(stream: EngineStream) -> None:
        with pytest.raises(EngineFailure, match="Done"):
            await EngineRun(stream, on_state=on_state).work(TOKENS)

    run(lambda streams, post: begin_session(streams, post=post), answers, use)


def test_a_text_may_be_left_in_the_middle() -> None:
    """Closing the stream ends the run, and what was drawn behind that is handed to nobody."""
    drawn, read = [], []

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        ended = isinstance(message, Tokens) and message.final
        return [Progress(name, 5), *(Generated(name, [token]) for token in (1, 2, 3))] if ended else []

    async def use(stream: EngineStream) -> None:
        async def on_tokens(event: Generated) -> None:
            drawn.extend(event.tokens)
            if len(drawn) == 2:
                stream.close()

        async def on_progress(event: Progress) -> None:
            read.append(event.processed)

        await EngineRun(stream, on_tokens=on_tokens, on_progress=on_progress).work(TOKENS)

    run(lambda streams, post: begin_completion(streams, SamplingSpec(9), post=post), answers, use)
    assert (drawn, read) == ([1, 2], [5])


def test_states_of_a_prompt_may_come_after_its_reader_has_left() -> None:
    """The last drawn token ends the text; the stream stays open until the engine has no more states."""
    states: list[int] = []

    async def scenario() -> None:
        posted: list[AnyMessage] = []
        streams = OpenStreams(StreamLimits())
        with begin_completion(streams, SamplingSpec(1), states_at=(3, 5), post=posted.append) as stream:
            stream.on_state = lambda state: states.append(state.position)
            name = stream.request_id
            streams.route(Credit(name, 1000))
            await stream.send(TOKENS, final=True)
            streams.route(Checkpoint(name, 3, 0, "00", "00", 9))
            streams.route(Generated(name, [1], finish_reason="length"))
            event = await stream.next()
            assert isinstance(event, Generated) and event.tokens == [1]
            assert await stream.next() is None
        assert len(streams) == 1 and states == [3]
        streams.route(Checkpoint(name, 5, 0, "01", "00", 9))
        streams.route(Done(name, 6, 1, 0))
        assert not len(streams) and not any(isinstance(message, Cancel) for message in posted)

    asyncio.run(scenario())
    assert states == [3, 5]


@pytest.mark.parametrize("when", ["waits", "ended", "over", "unasked", "beyond"])
def test_a_stored_state_that_nobody_takes_is_deleted(when: str) -> None:
    """Whether it waits when its reader leaves, comes after that, or was not asked for; one that was taken stays."""
    deleted: list[str] = []

    async def scenario() -> None:
        async def delete(blob: str) -> None:
            deleted.append(blob)

        async def record(state: Checkpoint) -> None:
            assert state.blob == "00"

        def state(position: int, blob: str) -> Checkpoint:
            return Checkpoint(stream.request_id, position, 0, blob, "00", 9)

        streams = OpenStreams(StreamLimits())
        streams.delete_blob = delete
        if when == "unasked":
            with begin_completion(streams, SamplingSpec(1), post=lambda _: None) as stream:
                streams.route(state(3, "01"))
        else:
            with begin_session(streams, post=lambda _: None) as stream:
                streams.route(Credit(stream.request_id, 1000))
                await stream.send(TOKENS, final=True)
                streams.route(state(5, "00"))
                if when == "beyond":
                    streams.route(state(6, "01"))
                    with pytest.raises(EngineFailure, match="Checkpoint"):
                        await EngineRun(stream, on_state=record).work(np.empty(0, dtype=np.int32))
                else:
                    assert await stream.next() == state(5, "00")
                if when == "waits":
                    streams.route(state(6, "01"))
                if when == "ended":
                    streams.route(Done(stream.request_id, 5, 0, 0))
                    streams.route(state(6, "01"))
        if when == "over":
            streams.route(state(6, "01"))
        streams.route(Checkpoint(stream.request_id, 7, 0, error="the store is full"))
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert deleted == ["01"]


@pytest.mark.parametrize("end", ["controller", "service"])
def test_a_stream_that_only_waits_for_states_ends_with_its_engine(end: str) -> None:
    """Nobody hears its error, and nothing of it stays."""

    async def scenario() -> None:
        streams = OpenStreams(StreamLimits())
        with begin_completion(streams, SamplingSpec(1), states_at=(5,), post=lambda _: None) as stream:
            stream.on_state = lambda state: None
            streams.route(Credit(stream.request_id, 1000))
            await stream.send(TOKENS, final=True)
            streams.route(Generated(stream.request_id, [1], finish_reason="length"))
        assert len(streams) == 1
        if end == "controller":
            streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
        else:
            streams.fail_all("stopping", Code.STOPPING)
        assert not len(streams)

    asyncio.run(scenario())
