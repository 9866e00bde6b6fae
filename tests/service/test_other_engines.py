"""Several engines: what one leaves undone another goes on with, from the right state, and not for ever."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import numpy as np
import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.engine.resending import EngineEvent, GivenMemory
from dist_attn_service.engine.stream import StreamLimits
from dist_attn_service.sessions.writer import TextRun
from dist_attn_service.text.tokenising import Piece, TextMark

from dist_attn.store.entries import Append
from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import (
    Accepted,
    BeginState,
    Cancel,
    Checkpoint,
    Credit,
    Done,
    Failed,
    FinishDrawing,
    Generated,
    Restored,
    Rows,
    RowSpec,
    SamplingSpec,
    Tokens,
)
from tests.support.begun import Desk, begin_encoding, begin_session
from tests.support.waiting import until

SECONDS = 60
TOKENS = np.arange(900, dtype=np.int32) % 257
INEXACT = RestoreReport(256, 0, False, "ranks was 1 and is 2")


def of_several() -> Desk:
    """The other end of streams that another engine may take over."""
    limits = StreamLimits(message_tokens=300, resend_seconds=SECONDS)
    return Desk(limits, GivenMemory(4_000, several=True))


def test_an_append_goes_on_at_another_engine_from_its_newest_stored_state() -> None:
    """Once the store has named it; only the tokens after it are sent again; the first engine is told to stop."""

    async def scenario() -> None:
        first, other = of_several(), of_several()
        stream = begin_session(first.streams, post=first.posted.append)
        old = stream.request_id
        first.streams.route(Credit(old, 5_000))
        await stream.send(TOKENS[:700], final=False)
        assert stream.any_model
        first.streams.route(Checkpoint(old, 512, 0, "ab", "cd", 9))
        await stream.send(TOKENS[700:], final=True)
        assert not stream.any_model
        first.streams.route(Failed(old, "engine_not_ready", "it ends"))
        assert stream.held and not stream.recorded and not first.streams.do_again()
        stream.recorded_as(BeginState(256, "12", "34", 9))  # an earlier one
        assert not stream.recorded
        known = BeginState(512, "same bytes", "cd", 9)
        stream.recorded_as(known)
        assert stream.recorded
        other.streams.take_over(stream, other.posted.append)
        assert first.posted[-1] == Cancel(old) and not len(first.streams)
        opened, new = other.posted[0], stream.request_id
        assert opened.begin == known and opened.keep.end
        other.streams.route(Credit(new, 5_000))
        again = [message for message in other.posted if isinstance(message, Tokens)]
        assert b"".join(message.tokens for message in again) == TOKENS[512:].astype("<i4").tobytes()
        assert again[0].start == 512 and again[-1].final
        other.streams.route(Checkpoint(new, 900, 0, "ef", "01", 9))
        other.streams.route(Done(new, 900, 0, 0))
        assert [(await stream.next()).position for _ in range(3)] == [512, 900, 900]
        stream.close()
        assert not len(other.streams)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


class Writer:
    """The writer of a new session over a store that is slow."""

    append = Append("", 0, 0)

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def keep(self, _: Checkpoint) -> str:
        """As the real one, later."""
        self.asked.set()
        await self.go_on.wait()
        return "a snapshot"

    async def begin_at(self, position: int, _: str) -> BeginState:
        """As the real one."""
        return BeginState(position, "same bytes", "cd", 9)


def test_a_state_at_which_the_text_turns_out_to_end_is_recorded() -> None:
    """Its engine is lost before the end is known: another one begins there, and answers."""

    async def scenario() -> None:
        first, other, writer, ended = of_several(), of_several(), Writer(), asyncio.Event()
        context = SimpleNamespace(engine=SimpleNamespace(engines=lambda: {"one": None, "other": None}))

        async def pieces() -> AsyncGenerator[Piece]:
            yield Piece(TOKENS[:512], np.ones(512), TextMark(tokens=512))
            await ended.wait()

        with begin_session(first.streams, post=first.posted.append) as stream:
            run = TextRun(context, writer, advance=None)
            work = asyncio.create_task(run.work(stream, pieces()))
            first.streams.route(Credit(stream.request_id, 5_000))
            await until(lambda: stream.sent == 512)
            first.streams.route(Checkpoint(stream.request_id, 512, 0, "ab", "cd", 9))
            await writer.asked.wait()
            first.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
            ended.set()
            await until(lambda: stream.final_sent)
            assert not stream.recorded
            writer.go_on.set()
            await until(lambda: stream.recorded)
            other.streams.take_over(stream, other.posted.append)
            other.streams.route(Credit(stream.request_id, 5_000))
            opened, end = other.posted
            assert opened.begin.blob == "same bytes" and end == Tokens(stream.request_id, 512, b"", True)
            other.streams.route(Checkpoint(stream.request_id, 512, 0, "ef", "cd", 9))
            other.streams.route(Done(stream.request_id, 512, 0, 0))
            await work
        assert run.snapshot == "a snapshot"

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_an_inexact_start_stays_in_the_report() -> None:
    """Another engine restores an append's own state exactly, and what came before it is inexact all the same."""

    async def scenario() -> list[EngineEvent | None]:
        first, other = of_several(), of_several()
        stream = begin_session(first.streams, BeginState(256, "00", "00", 100), post=first.posted.append)
        old = stream.request_id
        first.streams.route(Restored(old, INEXACT))
        first.streams.route(Credit(old, 5_000))
        await stream.send(TOKENS[:500], final=False)
        first.streams.route(Checkpoint(old, 512, 0, "ab", "cd", 9))
        first.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
        stream.recorded_as(BeginState(512, "ab", "cd", 9))
        other.streams.take_over(stream, other.posted.append)
        other.streams.route(Restored(stream.request_id, RestoreReport(512, 0, True, "")))
        other.streams.route(Credit(stream.request_id, 5_000))
        other.streams.route(Checkpoint(stream.request_id, 756, 0, "ef", "01", 9))
        events = [await stream.next() for _ in range(3)]
        stream.close()
        return events

    events = asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert [event.report for event in events if isinstance(event, Restored)] == [INEXACT]


def test_a_request_is_admitted_once_an_engine_has_taken_it() -> None:
    """Not by a refusal after which another engine is tried, nor by one without room; a first one without room ends."""

    async def scenario() -> None:
        first, other = of_several(), of_several()
        stream = begin_encoding(first.streams, post=first.posted.append)
        admitted = asyncio.create_task(stream.admitted(SECONDS))
        first.streams.route(Failed(stream.request_id, "engine_not_ready", "it drains"))
        other.streams.take_over(stream, other.posted.append)
        other.streams.route(Failed(stream.request_id, "overloaded", "no room"))
        await asyncio.sleep(0)
        assert not admitted.done() and other.streams.held == [stream]
        other.streams.take_over(stream)
        other.streams.route(Accepted(stream.request_id))
        await admitted
        stream.close()
        refused = begin_encoding(first.streams, post=first.posted.append)
        first.streams.route(Failed(refused.request_id, "overloaded", "no room"))
        with pytest.raises(ServiceError, match="no room"):
            await refused.admitted(SECONDS)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_work_that_ends_engine_after_engine_is_given_up() -> None:
    """Breaks are counted from the last row on, and engines that only stop are not; then it ends in words."""

    async def scenario() -> None:
        desks = [of_several(), of_several()]
        stream = begin_encoding(desks[0].streams, RowSpec(window=1), post=desks[0].posted.append)
        desks[0].streams.route(Credit(stream.request_id, 5_000))
        await stream.send(TOKENS[:500], final=True)

        def lose(how: str) -> None:
            desks[0].streams.route(Credit(stream.request_id, 5_000))
            if how == "breaks":
                desks[0].streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
            else:
                desks[0].streams.route(Failed(stream.request_id, "stopping", "it ends"))
            if stream.held:
                desks[1].streams.take_over(stream, desks[1].posted.append)
                desks.reverse()

        for how in ("breaks", "breaks", "stops", "breaks"):
            lose(how)
        desks[0].streams.route(Rows(stream.request_id, 0, [0, 1], [1, 2], bytes(8)))
        for _ in range(3):
            lose("breaks")
        assert isinstance(await stream.next(), Rows) and len(desks[0].streams)
        lose("breaks")
        with pytest.raises(ServiceError, match="4 engines in turn"):
            await stream.next()
        assert not desks[0].streams.held

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_an_append_without_room_is_kept_again_from_a_state_at_its_end() -> None:
    """What had to be forgotten is in the state; tokens that come later are there for another engine."""

    async def scenario() -> None:
        first, other = of_several(), of_several()
        stream = begin_session(first.streams, post=first.posted.append)
        first.streams.route(Credit(stream.request_id, 5_000))
        await stream.send(np.zeros(1024, dtype=np.int32), final=False)
        assert not stream.hold()
        first.streams.route(Checkpoint(stream.request_id, 1024, 0, "ab", "cd", 9))
        stream.recorded_as(BeginState(1024, "ab", "cd", 9))
        await stream.send(TOKENS[:100], final=True)
        assert stream.hold()
        other.streams.take_over(stream, other.posted.append)
        other.streams.route(Credit(stream.request_id, 5_000))
        opened, again = other.posted
        assert opened.begin.position == 1024
        assert again == Tokens(stream.request_id, 1024, TOKENS[:100].astype("<i4").tobytes(), True)
        stream.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_generation_that_was_to_end_is_told_so_again() -> None:
    """Another engine begins with the same state and seed, and draws no more than was wanted of the first."""

    async def scenario() -> None:
        first, other = of_several(), of_several()
        begin = BeginState(position=512, blob="00", digest="00", num_bytes=100)
        stream = begin_session(first.streams, begin, SamplingSpec(9), post=first.posted.append)
        await stream.send(TOKENS[:0], final=True)
        first.streams.route(Generated(stream.request_id, [5, 6, 7]))
        stream.finish_drawing(2)
        first.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
        other.streams.take_over(stream, other.posted.append)
        other.streams.route(Credit(stream.request_id, 2_000))
        opened, finish, end = other.posted
        assert opened.begin == begin and opened.draw.seed == first.posted[0].draw.seed is not None
        assert finish == FinishDrawing(stream.request_id, 2)
        assert end == Tokens(stream.request_id, 512, b"", True)
        stream.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
