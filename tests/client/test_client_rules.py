"""What decides about sending again, and how bytes become parts: without any connection."""

import io
from inspect import signature
from itertools import pairwise

import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.schemas.completions import CompletionRequest, DrawingOptions
from dist_attn_service.schemas.neutral_fields import words_on

from dist_attn_client import (
    AsyncClient,
    BrokenOff,
    Busy,
    Client,
    Conflict,
    OutOfTime,
    Overloaded,
    Refused,
    Retry,
    Unreachable,
)
from dist_attn_client.attempts import Attempts
from dist_attn_client.errors import KeyRefused, NotOurAnswer, QuotaUsed, ServiceFailed, error_of_answer
from dist_attn_client.files import AsyncFiles
from dist_attn_client.jobs import AsyncJobs
from dist_attn_client.plan import Event, EventDecoder, LineDecoder
from dist_attn_client.sessions import AsyncSessions
from dist_attn_client.sources import Source
from dist_attn_client.synchronous import Files, Jobs, Sessions
from dist_attn_client.texts import Drawing, Sampling
from dist_attn_client.transport import SyncTransport, at_once

LOST = BrokenOff("lost")


def refusal(code: str, status: int, **headers: str) -> Refused:
    """The exception for what the service answers."""
    error = ServiceError("words", code=Code(code), status=status, facts={"position": 7})
    found = error_of_answer(status, headers, error.body("req-1"), what="POST /x")
    assert isinstance(found, Refused)
    return found


def attempts(tries: int = 5, deadline_s: float | None = None) -> Attempts:
    """Tries at a clock that stands."""
    return Attempts(Retry(tries=tries, first_s=1, longest_s=5), lambda: 100.0, deadline_s, part=lambda: 0.0)


@pytest.mark.parametrize(
    ("error", "repeatable", "other"),
    [
        (Unreachable("nobody"), True, True),
        (LOST, True, False),
        (refusal("overloaded", 429, **{"retry-after": "3"}), True, True),
        (refusal("engine_not_ready", 503, **{"retry-after": "3"}), True, True),
        (refusal("stopping", 503), True, True),
        (refusal("session_busy", 409, **{"retry-after": "3"}), True, True),
        (refusal("body_timeout", 408), True, False),
        (refusal("engine_failed", 500), True, False),
        (refusal("engine_timeout", 504), True, False),
        (refusal("deadline_exceeded", 504, **{"x-should-retry": "false"}), False, False),
        (refusal("insufficient_quota", 429, **{"x-should-retry": "false"}), False, False),
        (refusal("conflict", 409, **{"x-should-retry": "false"}), False, False),
        (refusal("disk_full", 507), False, False),
        (refusal("invalid_value", 400), False, False),
        (refusal("overloaded", 429, **{"retry-after": "500"}), False, False),
        (error_of_answer(502, {}, b"<html>", what="POST /x"), True, False),
        (error_of_answer(200 + 104, {}, b"<html>", what="POST /x"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_is_sent_again(error: Refused, repeatable: bool, other: bool) -> None:
    """What was never begun always, what may have been done only where that does no harm, what cannot help never."""
    for safe, wanted in ((True, repeatable), (False, other)):
        tries = attempts()
        if wanted:
            asked = None if isinstance(error, Busy) else getattr(error, "retry_after_s", None)
            assert tries.wait_after(error, repeatable=safe) == (asked or 1.0)
        else:
            with pytest.raises(type(error)):
                tries.wait_after(error, repeatable=safe)


def test_an_error_made_by_hand_has_its_words() -> None:
    """The text of a refusal is its message, also by keyword, as code that tests its own handling makes them."""
    error = Refused(message="no", code="conflict")
    assert (str(error), error.args, error.code) == ("no", ("no",), "conflict")


def test_waits_grow_to_a_bound_and_end() -> None:
    """Each wait is twice the one before, up to the longest; the last try's error is told; progress begins anew."""
    tries = attempts(tries=6)
    assert [tries.wait_after(LOST, repeatable=True) for _ in range(5)] == [1, 2, 4, 5, 5]
    with pytest.raises(BrokenOff, match="lost"):
        tries.wait_after(LOST, repeatable=True)
    tries.progressed()
    assert tries.wait_after(LOST, repeatable=True) == 1
    halved = Attempts(Retry(first_s=1), lambda: 0.0, part=lambda: 1.0)
    assert halved.wait_after(LOST, repeatable=True) == 0.5


def test_a_busy_session_is_looked_at_until_its_writer_is_given_up() -> None:
    """Looks do not count as tries before the time that the service names, and afterwards they do."""
    clock = [0.0]
    tries = Attempts(Retry(tries=2, first_s=1, longest_s=8), lambda: clock[0], part=lambda: 0.0)
    busy = refusal("session_busy", 409, **{"retry-after": "60"})
    waits = []
    while clock[0] < 60:
        waits.append(tries.wait_after(busy, repeatable=False))
        clock[0] += waits[-1]
    assert waits[:5] == [1, 2, 4, 8, 8] and tries.failed == 0
    tries.wait_after(busy, repeatable=False)
    with pytest.raises(Busy):
        tries.wait_after(busy, repeatable=False)


def test_no_wait_goes_beyond_the_deadline() -> None:
    """What would be sent again too late is OutOfTime with the reason; so is whatever is asked after the deadline."""
    tries = attempts(deadline_s=1.5)
    assert tries.left_s() == 1.5 and tries.wait_after(LOST, repeatable=True) == 1
    with pytest.raises(OutOfTime, match=r"1\.5 s.*lost"):
        tries.wait_after(LOST, repeatable=True)
    times = iter((0.0, 2.0))
    with pytest.raises(OutOfTime, match="hand it in as a job"):
        Attempts(Retry(), lambda: next(times), 1.0).left_s()


def test_every_code_of_the_service_has_its_kind() -> None:
    """Codes become exceptions with status, facts and advice; what is no answer of this service is called that."""
    kinds = {str(code): type(refusal(code, 500)) for code in Code}
    assert kinds["session_busy"] is Busy and kinds["overloaded"] is Overloaded and kinds["stopping"] is Overloaded
    assert kinds["insufficient_quota"] is QuotaUsed and kinds["conflict"] is Conflict
    assert kinds["invalid_api_key"] is KeyRefused and kinds["internal_error"] is ServiceFailed
    conflict = refusal("conflict", 409)
    assert isinstance(conflict, Conflict) and conflict.position == 7 and conflict.facts == {"position": 7}
    assert "DIST_ATTN_API_KEY" in str(refusal("invalid_api_key", 401))
    assert isinstance(error_of_answer(404, {}, b"nginx", what="GET /x"), NotOurAnswer)


@pytest.mark.parametrize(
    ("plain", "other"),
    [(Client, AsyncClient), (Sessions, AsyncSessions), (Files, AsyncFiles), (Jobs, AsyncJobs)],
    ids=lambda kind: kind.__name__,
)
def test_both_clients_have_the_same_methods(plain: type, other: type) -> None:
    """Each method of the one is there in the other, with the same parameters and words."""
    names = [{name for name in dir(kind) if not name.startswith("_")} for kind in (plain, other)]
    assert names[0] - {"sessions", "files", "jobs"} == names[1] - {"sessions", "files", "jobs"}
    for name in names[0] & names[1]:
        assert signature(getattr(plain, name)).parameters == signature(getattr(other, name)).parameters
        assert getattr(plain, name).__doc__ == getattr(other, name).__doc__


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_parts_do_not_depend_on_where_bytes_were_cut(cut: int) -> None:
    """Lines and events come whole however they travelled; comments and blank lines are none."""
    lines, events = LineDecoder(), EventDecoder()
    text = b'{"a":1}\n\n{"b":2}\n{"unfinished'
    sse = b": ping\n: ping\n\ndata: one\n\nid: 7\nevent: progress\ndata: two\r\ndata: three\n\ndata: [DONE]\n\ndata: no"
    found_lines = [part for at in range(0, len(text), cut) for part in lines.push(text[at : at + cut])]
    found_events = [part for at in range(0, len(sse), cut) for part in events.push(sse[at : at + cut])]
    assert found_lines == [b'{"a":1}', b'{"b":2}']
    assert found_events == [Event(b"one"), Event(b"two\nthree", "progress", 7), Event(b"[DONE]")]


def test_a_stream_can_be_opened_again_at_any_byte() -> None:
    """Also one that can be read once, whatever was read of it before; of that a copy is kept, and nothing else."""
    data = bytes(range(256)) * 40

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.rest = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            return self.rest.read(min(size, 1000))

    async def read(source: Source, start: int, most: int = 1 << 30) -> bytes:
        found = b""
        async for piece in source.pieces(SyncTransport().blocking, start):
            found += piece
            if len(found) >= most:
                break
        return found

    sources = (data, io.BytesIO(data), Pipe(), [data[a:b] for a, b in pairwise(range(0, len(data) + 1, 512))])
    for source in map(Source, sources):
        assert data.startswith(at_once(read(source, 0, 2500)))
        assert at_once(read(source, 1234)) == data[1234:]
        assert at_once(read(source, 0)) == data
        assert at_once(source.measure(SyncTransport().blocking)) == len(data)
        source.close()


def test_the_client_takes_the_options_of_drawing() -> None:
    """Every option with which the service draws is one of the client's, and the client has no other."""
    answered_by_methods = {"stream", "priority", "deadline_seconds", "user", "model"}
    drawing = (DrawingOptions.model_fields.keys() | {"max_tokens", "logprobs"}) - answered_by_methods
    assert set(Drawing.__annotations__) == drawing
    offered = {name for name in CompletionRequest.model_fields if words_on(CompletionRequest, (name,)) is None}
    assert set(Sampling.__annotations__) - {"priority", "model"} <= offered
