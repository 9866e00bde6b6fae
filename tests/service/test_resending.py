"""A controller that dies: what is open goes on with the next one, and nothing is delivered twice."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from dist_attn_service.base.errors import Code, EngineFailure, ServiceError
from dist_attn_service.base.logs import make_log
from dist_attn_service.engine.port import ZmqEnginePort
from dist_attn_service.engine.resending import EngineEvent, GivenMemory, Inbox
from dist_attn_service.engine.stream import EngineStream, StreamLimits

from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    BeginState,
    Cancel,
    Checkpoint,
    Credit,
    Done,
    Failed,
    Generated,
    Restored,
    Rows,
    RowSpec,
    SamplingSpec,
    Tokens,
)
from dist_attn.wire.specs import Terms
from tests.support.begun import Desk, begin_completion, begin_encoding, begin_session
from tests.support.fake_engine import FakeEngine, fake_controller, row_vector
from tests.support.fake_sessions import MANIFEST
from tests.support.opening import draw_of, is_completion, is_encoding, states_at

SECONDS = 60
LIMITS = StreamLimits(message_tokens=300, resend_seconds=0.2)
SHORT_OF_MEMORY = StreamLimits(message_tokens=300, resend_bytes=4_000)
TOKENS = np.arange(900, dtype=np.int32) % 257


def rows_from(first: int, values: list[int]) -> Rows:
    """Rows of one number each."""
    numbers = np.array(values, dtype="<f4").tobytes()
    return Rows("a", first, [*range(first, first + len(values))], [*range(first + 1, first + 1 + len(values))], numbers)


def _handed_on(inbox: Inbox, event: EngineEvent) -> EngineEvent | None:
    inbox.put(event)
    return inbox.take() if len(inbox) else None


def test_rows_that_come_again_are_cut_off() -> None:
    """However the rows are cut into messages the second time, each is handed on once; a gap is an error."""
    inbox = Inbox(1 << 20)
    assert _handed_on(inbox, rows_from(0, [0, 1, 2])) == rows_from(0, [0, 1, 2])
    inbox.begin_again()
    assert _handed_on(inbox, rows_from(0, [0, 1])) is None
    assert _handed_on(inbox, rows_from(2, [2, 3, 4])) == rows_from(3, [3, 4])
    assert _handed_on(inbox, rows_from(5, [5])) == rows_from(5, [5])
    with pytest.raises(EngineFailure, match="row 6 was due"):
        _handed_on(inbox, rows_from(7, [7]))


def test_tokens_that_are_drawn_again_are_compared() -> None:
    """Those that were delivered are left out, the end always comes, and another token is an error."""
    inbox = Inbox(1 << 20)
    assert _handed_on(inbox, Generated("a", [5, 6])) == Generated("a", [5, 6])
    inbox.begin_again()
    assert _handed_on(inbox, Generated("a", [5])) is None
    assert _handed_on(inbox, Generated("a", [6, 7])) == Generated("a", [7])
    assert _handed_on(inbox, Generated("a", [], "stop")) == Generated("a", [], "stop")
    inbox.begin_again()
    with pytest.raises(EngineFailure, match="other tokens"):
        _handed_on(inbox, Generated("a", [5, 9]))


def test_an_encoding_goes_on_with_the_next_controller(tmp_path: Path) -> None:
    """Rows that came before the first one died are not repeated, and all of them are those of a run in peace."""
    address = f"ipc://{tmp_path}/c"

    async def scenario() -> list[bytes]:
        port = ZmqEnginePort(address, StreamLimits(message_tokens=300), make_log(), status_seconds=0.05)
        await port.start()
        with fake_controller(FakeEngine(credit=500, stingy=True), address):
            while not port.health().ready:  # noqa: ASYNC110 - a port has no event for this
                await asyncio.sleep(0.005)
            stream = begin_encoding(port, RowSpec(window=90))
            sending = asyncio.create_task(stream.send(TOKENS, final=True))
            first = await stream.next()
            assert isinstance(first, Rows) and len(first.starts) == 3
        with fake_controller(FakeEngine(credit=400), address):
            await sending
            rest = await _rows_of_rest(stream)
            stream.close()
            await port.close()
        return [first.vectors[at : at + 32] for at in range(0, len(first.vectors), 32)] + rest

    async def _rows_of_rest(stream: EngineStream) -> list[bytes]:
        vectors: list[bytes] = []
        while isinstance(event := await stream.next(), Rows):
            vectors += [event.vectors[at : at + 32] for at in range(0, len(event.vectors), 32)]
        return vectors

    made = asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert made == [row_vector(TOKENS[at : at + 90], "mean").tobytes() for at in range(0, 900, 90)]


def test_another_model_does_not_go_on_with_what_one_began(tmp_path: Path) -> None:
    """Rows of two models must not stand in one answer: it ends in words where the next controller has another one."""
    address = f"ipc://{tmp_path}/c"
    other = msgspec.structs.replace(MANIFEST.model, weights="f" * 64)

    async def scenario() -> FakeEngine:
        port = ZmqEnginePort(address, StreamLimits(message_tokens=300), make_log(), status_seconds=0.05)
        await port.start()
        with fake_controller(FakeEngine(credit=500, stingy=True), address):
            while not port.health().ready:  # noqa: ASYNC110 - a port has no event for this
                await asyncio.sleep(0.005)
            stream = begin_encoding(port, RowSpec(window=90))
            sending = asyncio.create_task(stream.send(TOKENS, final=True))
            await stream.next()
        second = FakeEngine(manifest=msgspec.structs.replace(MANIFEST, model=other))
        with fake_controller(second, address):
            with pytest.raises(ServiceError, match="another model"):
                await sending
            stream.close()
            await port.close()
        return second

    second = asyncio.run(asyncio.wait_for(scenario(), SECONDS))
    assert not any(is_encoding(message) for message in second.received)


def test_a_completion_is_drawn_again_from_the_same_seed() -> None:
    """The seed is settled before the first controller sees it; the whole prompt and its end are sent to the second."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        terms = Terms(deadline_s=50.0)
        stream = begin_completion(desk.streams, SamplingSpec(9), name="me", terms=terms, post=desk.posted.append)
        old, seed = stream.request_id, draw_of(desk.last(is_completion)).seed
        for message in (Accepted(old), Credit(old, 700)):
            desk.streams.route(message)
        sending = asyncio.create_task(stream.send(TOKENS, final=True))
        await asyncio.sleep(0)
        desk.streams.route(Credit(old, 2000))
        await sending
        desk.streams.route(Generated(old, [1]))
        desk.streams.route(Failed(old, "stopping", "it ends"))
        assert stream.held and not sending.cancelled()
        assert desk.streams.do_again() == 1
        new = stream.request_id
        assert new != old and new.startswith("me.")
        cancelled, opened = desk.posted[-2:]
        assert cancelled == Cancel(old) and opened.request_id == new
        assert draw_of(opened).seed == seed is not None and 0 < opened.terms.deadline_s <= 50
        desk.streams.route(Generated(old, [3]))  # of the old one: nobody listens
        desk.streams.route(Credit(new, 500))
        desk.streams.route(Credit(new, 2000))
        again = [message for message in desk.posted if isinstance(message, Tokens) and message.request_id == new]
        assert b"".join(message.tokens for message in again) == TOKENS.astype("<i4").tobytes()
        assert [message.start for message in again] == [0, 300, 500, 800]
        assert [message.final for message in again] == [False, False, False, True]
        for message in (Generated(new, [1, 2]), Generated(new, [], "stop")):
            desk.streams.route(message)
        assert [(await stream.next()).tokens for _ in range(3)] == [[1], [2], []]
        stream.close()
        assert not len(desk.streams)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_prompt_behind_a_stored_state_is_read_whole_the_second_time() -> None:
    """The next controller gets no state: the tokens that were in it are sent as well."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        states: list[Checkpoint] = []
        begin = BeginState(position=512, blob="00", digest="00", num_bytes=100)
        stream = begin_completion(desk.streams, SamplingSpec(9), begin, (768,), post=desk.posted.append)
        stream.on_state = states.append
        old = stream.request_id
        assert not stream.hold()
        desk.streams.route(Accepted(old))
        desk.streams.route(Restored(old, RestoreReport(512, 0, True, "")))
        desk.streams.route(Credit(old, 2000))
        stream.stands_for(TOKENS[:512])
        await stream.send(TOKENS[512:], final=True)
        assert stream.hold()
        desk.streams.do_again()
        new = stream.request_id
        opened = desk.last(is_completion)
        assert opened.begin is None and states_at(opened) == ()
        desk.streams.route(Credit(new, 2000))
        again = [message for message in desk.posted if isinstance(message, Tokens) and message.request_id == new]
        assert b"".join(message.tokens for message in again) == TOKENS.astype("<i4").tobytes()
        desk.streams.route(Generated(new, [4], "length"))
        assert (await stream.next()).tokens == [4]
        stream.close()
        assert not len(desk.streams) and not states

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_nothing_waits_for_a_state_that_is_not_restored_any_more() -> None:
    """The next controller reads the whole prompt: its reader goes on at once."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        begin = BeginState(position=512, blob="00", digest="00", num_bytes=100)
        with begin_completion(desk.streams, SamplingSpec(9), begin, post=desk.posted.append) as stream:
            stream.stands_for(TOKENS[:512])
            restoring = asyncio.create_task(stream.restored())
            desk.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
            assert desk.streams.do_again() == 1
            await restoring

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_an_input_that_had_not_begun_is_opened_again() -> None:
    """Without tokens there is nothing to send again, but for the end of an empty document."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        waiting, empty = (begin_encoding(desk.streams, post=desk.posted.append) for _ in range(2))
        await empty.send(TOKENS[:0], final=True)
        desk.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
        assert desk.streams.do_again() == 2
        mine = [message for message in desk.posted if getattr(message, "request_id", "") == empty.request_id]
        opening, end = mine
        assert is_encoding(opening) and isinstance(end, Tokens) and end.final
        mine = [message for message in desk.posted if getattr(message, "request_id", "") == waiting.request_id]
        assert len(mine) == 1 and is_encoding(mine[0])
        waiting.close(), empty.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_what_ends_while_it_waits_is_not_done_again() -> None:
    """The last words of a controller may be read after its end is noticed: then there is nothing left to do."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        encoding = begin_encoding(desk.streams, post=desk.posted.append)
        completion = begin_completion(desk.streams, SamplingSpec(9), None, (256,), post=desk.posted.append)
        completion.on_state = lambda state: None
        for stream in (encoding, completion):
            desk.streams.route(Credit(stream.request_id, 2000))
            await stream.send(TOKENS[:400], final=True)
        desk.streams.hold_all("gone", Code.ENGINE_UNREACHABLE)
        assert encoding.held and completion.held
        posted = len(desk.posted)
        desk.streams.route(Done(encoding.request_id, 400, 0, 0))
        desk.streams.route(Generated(completion.request_id, [3], "length"))
        assert desk.streams.do_again() == 0
        assert isinstance(await encoding.next(), Done)
        assert (await completion.next()).tokens == [3]
        encoding.close(), completion.close()
        assert len(desk.posted) == posted and not len(desk.streams)

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_what_cannot_be_done_again_ends_in_words() -> None:
    """Sessions, and inputs for which the memory of all requests together does not suffice; closed ones give it back."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        session = begin_session(desk.streams, post=desk.posted.append)
        long, short = (begin_encoding(desk.streams, post=desk.posted.append) for _ in range(2))
        for stream, count in ((long, 1001), (short, 1000)):
            desk.streams.route(Credit(stream.request_id, 5000))
            await stream.send(np.zeros(count, dtype=np.int32), final=False)
        desk.streams.hold_all("the controller broke", Code.ENGINE_UNREACHABLE)
        for stream in (session, long):
            with pytest.raises(ServiceError, match="the controller broke"):
                await stream.next()
        assert short.held and not long.held
        desk.streams.fail_held("nobody came", Code.ENGINE_UNREACHABLE)
        assert not desk.streams.held  # also before its reader has heard of it
        with pytest.raises(ServiceError, match="nobody came"):
            await short.next()
        short.close()
        other = begin_encoding(desk.streams, post=desk.posted.append)
        desk.streams.route(Credit(other.request_id, 5000))
        await other.send(np.zeros(1000, dtype=np.int32), final=False)
        assert other.hold()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_the_longest_input_makes_room_for_the_others() -> None:
    """When the memory is full the one that holds most lets go, also while it waits for another controller."""

    async def scenario() -> None:
        desk = Desk(SHORT_OF_MEMORY)
        long, short = (begin_encoding(desk.streams, post=desk.posted.append) for _ in range(2))
        for stream, count in ((long, 900), (short, 50)):
            desk.streams.route(Credit(stream.request_id, 5000))
            await stream.send(np.zeros(count, dtype=np.int32), final=False)
        assert long.hold() and not short.held
        await short.send(np.zeros(100, dtype=np.int32), final=False)
        assert short.hold()
        assert desk.streams.do_again() == 2
        with pytest.raises(ServiceError, match="no memory"):
            await long.next()
        desk.streams.route(Credit(short.request_id, 5000))
        assert [len(m.tokens) for m in desk.posted if isinstance(m, Tokens) and m.request_id == short.request_id] == [
            600
        ]

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


class Stopping(FakeEngine):
    """An engine that ends a request as soon as its text comes, and stays connected."""

    def handle(self, message: AnyMessage) -> list[AnyMessage]:
        """The answers of one that stops, and takes its time."""
        if isinstance(message, Tokens):
            return [Failed(message.request_id, "stopping", "it ends")]
        return super().handle(message)


@pytest.mark.parametrize("several", [False, True])
def test_a_request_waits_for_its_sole_engine_however_long_that_takes_to_stop(several: bool, tmp_path: Path) -> None:
    """The time for another controller runs from the end of the connection; with several engines from the refusal."""
    address = f"ipc://{tmp_path}/c"

    async def scenario() -> None:
        memory = GivenMemory(4_000, several=several)
        port = ZmqEnginePort(address, LIMITS, make_log(), status_seconds=0.05, stale_seconds=SECONDS, memory=memory)
        await port.start()
        with fake_controller(Stopping(), address):
            while not port.health().ready:  # noqa: ASYNC110 - a port has no event for this
                await asyncio.sleep(0.005)
            stream = begin_encoding(port, RowSpec(window=90))
            await stream.send(TOKENS[:90], final=True)
            waiting = asyncio.create_task(stream.next())
            if several:
                with pytest.raises(ServiceError, match="it ends: no other one came"):
                    await waiting
            else:
                while not stream.held:  # noqa: ASYNC110 - a stream has no event for this
                    await asyncio.sleep(0.005)
                await asyncio.sleep(3 * LIMITS.resend_seconds)
                assert stream.held and port.health().ready
                # ZeroMQ connects anew after 0.1 s at the earliest: on a busy machine the next one would come too late.
                port._limits = StreamLimits(message_tokens=300)
        with fake_controller(FakeEngine(), address):
            if not several:
                assert isinstance(await waiting, Rows)
            stream.close()
            await port.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def test_a_bug_in_handing_on_does_not_end_a_connection(tmp_path: Path) -> None:
    """It is logged, and messages are read and delivered all the same."""
    address = f"ipc://{tmp_path}/c"

    async def scenario() -> None:
        told = []

        def bug() -> None:
            told.append(1)
            raise ZeroDivisionError

        port = ZmqEnginePort(address, LIMITS, make_log(), status_seconds=0.05)
        port.changed = bug
        await port.start()
        with fake_controller(FakeEngine(), address):
            while len(told) < 2:  # noqa: ASYNC110 - a port has no event for this
                await asyncio.sleep(0.005)
            with begin_encoding(port, RowSpec(window=90)) as stream:
                await stream.send(TOKENS[:90], final=True)
                assert isinstance(await stream.next(), Rows)
            await port.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))
