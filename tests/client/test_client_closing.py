"""What a client lets go of, and what it does not hand out twice: without any connection."""

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import msgspec
import pytest

from dist_attn_client import AppendProgress, BrokenOff, Missing, NotOurAnswer, Retry
from dist_attn_client.asynchronous import Flows
from dist_attn_client.errors import error_of_answer
from dist_attn_client.plan import Call, Event
from dist_attn_client.sessions import AppendPlan
from dist_attn_client.texts import TextPlan
from dist_attn_client.transport import Answer, Outgoing, SyncTransport, at_once

ROW = b'{"index":0,"start":0,"stop":1,"byte_start":0,"byte_stop":1,"embedding":[1.0]}\n'


class OneAnswer:
    """Rows without an end."""

    status = 200
    headers: Mapping[str, str] = {"content-type": "application/x-ndjson"}

    def __init__(self) -> None:
        self.closed = self.ended = False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield ROW
        finally:
            self.ended = True

    async def close(self) -> None:
        self.closed = True


class HeldTransport:
    """Takes one piece of each body and keeps a hold on the rest of it; then breaks off, or answers."""

    def __init__(self, answer: OneAnswer | None) -> None:
        self.answer = answer
        self.bodies: list[AsyncGenerator[bytes, None]] = []
        self.blocking = self._own.blocking
        self.close = self._own.close
        self.sleep = self._own.sleep

    _own = SyncTransport()

    async def send(self, request: Outgoing) -> Answer:
        assert isinstance(request.body, AsyncGenerator)
        self.bodies.append(request.body)
        assert await anext(request.body) == b"a" * (1 << 18)
        if self.answer is None:
            raise BrokenOff("lost")
        return self.answer


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A file of several pieces."""
    path = tmp_path / "book.txt"
    path.write_bytes(b"a" * (1 << 20))
    return path


def test_a_document_that_was_not_sent_to_its_end_is_closed(book: Path) -> None:
    """After each lost connection the rest of its body is closed, however long others hold it."""
    transport = HeldTransport(None)
    flows = Flows(transport, "http://x", retry=Retry(tries=2, first_s=0), silence_s=1)
    with pytest.raises(BrokenOff):
        at_once(flows.encode(book).rest())
    assert [body.ag_frame for body in transport.bodies] == [None, None]  # type: ignore[attr-defined]


def test_a_stream_that_is_left_closes_answer_and_body(book: Path) -> None:
    """The answer, what reads it, and the rest of what is sent, in that moment."""
    answer = OneAnswer()
    transport = HeldTransport(answer)
    stream = Flows(transport, "http://x", silence_s=1).encode(book, granularity="token")
    assert at_once(anext(stream)).index == 0
    assert not answer.closed and not answer.ended
    at_once(stream.aclose())
    assert answer.closed and answer.ended and transport.bodies[0].ag_frame is None  # type: ignore[attr-defined]


def test_progress_of_an_append_that_is_sent_again_is_told_once() -> None:
    """What was told before a break is no progress: connections that always break at the same place come to an end."""
    plan = AppendPlan(Call("POST", "/x"))

    def take(position: int, kept: int) -> list[object]:
        line = {"object": "session.append.progress", "position": position, "kept": kept}
        return list(plan.take(msgspec.json.encode(line)))

    def told(position: int, kept: int) -> AppendProgress:
        return AppendProgress(position=position, kept=kept)

    assert take(10, 0) == [told(10, 0)] and take(20, 8) == [told(20, 8)]
    assert take(10, 8) == [] and take(20, 8) == []
    assert take(18, 16) == [told(18, 16)] and take(21, 16) == [told(21, 16)]


def text_event(text: str, reason: str | None = None) -> Event:
    """One event of a streamed text."""
    return Event(msgspec.json.encode({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}))


def test_the_last_piece_of_a_text_comes_once() -> None:
    """A connection that breaks behind it, before the usage, does not bring it again."""
    plan = TextPlan(Call("POST", "/x"))
    found = []
    for _ in range(2):
        plan.begin({"content-type": "text/event-stream"})
        found += [piece for event in (text_event("ab"), text_event("", "stop")) for piece in plan.take(event)]
    assert [(piece.text, piece.finish_reason) for piece in found] == [("ab", None), ("", "stop")]  # type: ignore[union-attr]


def test_a_text_that_comes_out_shorter_is_another_one() -> None:
    """Drawn again, it ends before what was handed out: that is an error too."""
    plan = TextPlan(Call("POST", "/x"))
    plan.begin({"content-type": "text/event-stream"})
    assert len(list(plan.take(text_event("abc")))) == 1
    plan.begin({"content-type": "text/event-stream"})
    with pytest.raises(NotOurAnswer, match="came out otherwise"):
        list(plan.take(text_event("ab", "stop")))


def test_a_refusal_without_a_body_has_its_kind() -> None:
    """The service's answer to HEAD has none: an upload that is gone is missing, not another service."""
    headers = {"content-type": "application/problem+json", "x-request-id": "req-1"}
    found = error_of_answer(404, headers, b"", what="HEAD /v1/uploads/x")
    assert isinstance(found, Missing) and (found.status, found.request_id) == (404, "req-1")
    assert isinstance(error_of_answer(404, {}, b"", what="HEAD /x"), NotOurAnswer)
