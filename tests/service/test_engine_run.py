"""One request's work in the engine: what comes of it is handed on in order, and what does not fit ends it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.engine.port import OpenStreams
from dist_attn_service.engine.run import EngineRun
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.messages import (
    AnyMessage,
    Checkpoint,
    Credit,
    Done,
    Generated,
    Progress,
    Rows,
    RowSpec,
    SamplingSpec,
    StateCredit,
    StatePiece,
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


def test_a_state_is_taken_whole_before_anything_else_comes() -> None:
    """Who does not want the bytes of a state does not keep the engine waiting, and the end follows the last state."""
    data, at = bytes(range(200)), []

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        match message:
            case Tokens(final=True):
                return [Checkpoint(name, 5, 0, len(data))]
            case StateCredit(upto=upto):
                assert upto == len(data)
                return [StatePiece(name, 5, 0, data), Done(name, 5, 0, 0)]
        return []

    async def use(stream: EngineStream) -> None:
        async def on_state(position: int, _: AsyncIterator[bytes]) -> None:
            at.append((position, engine.ends_at(position)))

        engine = EngineRun(stream, on_state=on_state)
        await engine.work(TOKENS)
        assert engine.kept == 5

    run(lambda streams, post: begin_session(streams, post=post), answers, use)
    assert at == [(5, True)]


def test_an_end_without_its_state_is_an_error() -> None:
    """A session whose last state has not come is not done."""

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        return [Done(name, 5, 0, 0)] if isinstance(message, Tokens) else []

    async def on_state(_: int, data: AsyncIterator[bytes]) -> None:
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


def test_drawn_tokens_outlive_the_fetching_of_states() -> None:
    """Who fetches the states of a prompt may be done before the last drawn token is taken, which then still comes."""

    def answers(name: str, message: AnyMessage) -> list[AnyMessage]:
        drawn = Generated(name, [1], finish_reason="length")
        return [drawn, Done(name, 6, 1, 0)] if isinstance(message, Tokens) else []

    async def use(stream: EngineStream) -> None:
        stream.fetch_states()
        await stream.send(TOKENS, final=True)
        assert await stream.next_state() is None
        stream.end_states()
        event = await stream.next()
        assert isinstance(event, Generated) and event.tokens == [1]
        assert await stream.next() is None

    run(lambda streams, post: begin_completion(streams, SamplingSpec(1), states_at=(5,), post=post), answers, use)
