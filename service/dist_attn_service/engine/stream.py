"""One request as the API sees it: tokens out as far as credit allows, results in through a bounded inbox."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import numpy as np

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    EncodingDone,
    Failed,
    Generated,
    Progress,
    Rows,
    Tokens,
)
from dist_attn_service.base.errors import Code, EngineFailure, EngineUnavailable, ServiceError, engine_error
from dist_attn_service.base.tracing import EngineTrace
from dist_attn_service.engine.resending import Delivered, GivenMemory, GivenTokens

__all__ = ["EngineEvent", "EngineStream", "StreamLimits"]

EngineEvent = Rows | EncodingDone | Generated


@dataclass(frozen=True)
class StreamLimits:
    """How much one request may have under way and how long the engine may be silent.

    Units: bytes, tokens, seconds.
    """

    silence_seconds: float = 300
    message_tokens: int = 16_384
    inbox_soft_bytes: int = 16 << 20
    inbox_hard_bytes: int = 256 << 20
    resend_bytes: int = 16 << 20
    resend_seconds: float = 30


class EngineStream:
    """The API's end of one request. Use it as a context manager: leaving it early cancels the work.

    `post` hands a message to the controller and never waits; `forget` ends the delivery of messages. One that is told
    to `keep_for_another` outlives its controller: the port has it `hold`, and `do_again` with the next one.
    """

    def __init__(
        self,
        request_id: str,
        post: Callable[[AnyMessage], None],
        forget: Callable[[str], None],
        limits: StreamLimits,
    ) -> None:
        self.request_id = request_id
        self._post = post
        self._forget = forget
        self._limits = limits
        self._inbox: deque[AnyMessage] = deque()
        self._inbox_bytes = 0
        self._credit = 0
        self._sent = 0
        self._delivered = Delivered()
        self.trace = EngineTrace()
        self._opening: Callable[[str], AnyMessage] | None = None
        self._given: GivenTokens | None = None
        self._held = False
        self._sent_again: int | None = None  # how many tokens the next controller has got of those that were sent
        self._final_sent = False
        self._accepted = False
        self._ended = False
        self._error: ServiceError | None = None
        self._heard = time.monotonic()
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; the controller is told to cancel unless the request has ended already."""
        self._forget(self.request_id)
        self._finish_trace()
        if self._given is not None:
            self._given.let_go()
        if not self._ended:
            self._ended = True
            self._post(Cancel(request_id=self.request_id))

    # ---- from the port -------------------------------------------------------------------------

    def deliver(self, message: AnyMessage) -> None:
        """Take one message of the controller; called by the port's reader, never waits."""
        if self._ended:
            return
        self._accepted = True
        if isinstance(message, Rows | Generated | Progress | EncodingDone):
            self.trace.worked()
        match message:
            case Accepted():
                pass
            case Credit(upto=upto) if upto <= self._credit:
                return  # the controller looks whether we are still here: no progress
            case Credit(upto=upto):
                self._credit = upto
                self._send_again()
            case Failed(code=Code.STOPPING) if self.hold():
                pass  # the controller ends: the next one goes on
            case Failed(code=code, message=text, retry_after_s=wait):
                self._ended = True
                self._error = engine_error(code, text, wait)
            case Progress():
                # Of several that nobody has taken yet only the last one says anything.
                if self._inbox and isinstance(self._inbox[-1], Progress):
                    self._inbox.pop()
                self._inbox.append(message)
            case Rows():
                self._take_rows(message)
            case EncodingDone():
                self._inbox.append(message)
                self._ended = True
            case Generated():
                self._take_tokens(message)
            case _:
                self.deliver_more(message)
        self._heard = time.monotonic()
        self._notify()

    def deliver_more(self, message: AnyMessage) -> None:
        """Take a message that only some kinds of work have; there is none here."""

    def _ends_with(self, message: Generated) -> bool:
        return message.finish_reason is not None

    def fail(self, error: ServiceError) -> None:
        """End the stream with an error that did not come from the controller."""
        if self._error is None and not self._ended:
            self._error = error
            self._notify()

    def _finish_trace(self) -> None:
        trace, self.trace = self.trace, EngineTrace()
        left = "" if self._ended else "cancelled"
        trace.ended(self._sent, str(self._error.code) if self._error is not None else left)

    def _take_tokens(self, message: Generated) -> None:
        try:
            new = self._delivered.new_tokens(message)
        except EngineFailure as error:
            self.fail(error)
            return
        if new is not None:
            self._inbox.append(new)
            self._ended = self._ends_with(new)

    def _take_rows(self, message: Rows) -> None:
        try:
            rows = self._delivered.new_rows(message)
        except EngineFailure as error:
            self.fail(error)
            return
        if rows is None:
            return
        if self._inbox_bytes + len(rows.vectors) > self._limits.inbox_hard_bytes:
            self.fail(
                ServiceError(
                    f"more than {self._limits.inbox_hard_bytes} bytes of rows wait in memory; "
                    "ask for fewer rows at once (a larger window) or a smaller document",
                    code=Code.OVERLOADED,
                    status=500,
                )
            )
            return
        self._inbox_bytes += len(rows.vectors)
        self._inbox.append(rows)

    # ---- when the controller dies --------------------------------------------------------------

    def keep_for_another(self, opening: Callable[[str], AnyMessage], memory: GivenMemory) -> None:
        """Remember from now on what is sent; `opening` makes the message that opens the request under another id."""
        self._opening, self._given = opening, GivenTokens(memory)

    @property
    def held(self) -> bool:
        """Whether it waits for another controller. What was on its way from the old one may still end it."""
        return self._held and not self._ended

    def hold(self) -> bool:
        """The controller is gone: wait for another one. False where that could not do the work again."""
        if self._ended or self._error is not None or self._held:
            return True
        if not self._can_be_done_again():
            return False
        self._held, self._credit = True, 0
        self.trace.told("controller lost")
        return True

    def _can_be_done_again(self) -> bool:
        """Whether all tokens from the first one on are there."""
        return self._given is not None and self._given.whole and len(self._given) == self._sent

    def do_again(self, request_id: str) -> None:
        """Have another controller do the work from its beginning, under a new id; what has been delivered is not again.

        What was on its way to the controller before may reach this one, so that the old id is cancelled first.
        """
        assert self._opening is not None and self._given is not None
        self._post(Cancel(self.request_id))
        self.request_id, self._held, self._credit = request_id, False, 0
        if not self._given.whole:
            self._cannot_be_done_again()
            return
        self._delivered.begin_again()
        self._sent_again = 0 if self._sent or self._final_sent else None
        self._heard = time.monotonic()
        self._post(self._opening(request_id))
        self.trace.told("another controller")
        if not self._sent:
            self._send_again()
        self._notify()

    def _cannot_be_done_again(self) -> None:
        words = "the engine's controller was started again, and there was no memory to keep this input; send it again"
        self.fail(EngineFailure(words, code=Code.ENGINE_UNREACHABLE))

    def _send_again(self) -> None:
        """Send as many of the tokens that were sent before as there is credit for."""
        while self._sent_again is not None and self._given is not None:
            if not self._given.whole:
                self._sent_again = None
                self._cannot_be_done_again()
                return
            at = self._sent_again
            stop = min(self._sent, self._credit, at + self._limits.message_tokens)
            if stop <= at < self._sent:
                return
            last = stop == self._sent
            self._post(Tokens(self.request_id, at, self._given.between(at, stop), last and self._final_sent))
            self._sent_again = None if last else stop

    # ---- from the request ----------------------------------------------------------------------

    async def admitted(self, within_seconds: float) -> None:
        """Wait until the controller has taken the request.

        Raises: ServiceError when it refuses, goes away, or does not answer in time.
        """
        deadline = time.monotonic() + within_seconds
        while not self._accepted and self._error is None:
            if self._held:
                deadline = time.monotonic() + within_seconds
            if not await self._wait_until(deadline) and not (self._accepted or self._held):
                raise EngineUnavailable(
                    f"the engine's controller did not answer a new request within {within_seconds:g} s",
                    code=Code.ENGINE_UNREACHABLE,
                )
        if self._error is not None:
            raise self._error

    async def send(self, tokens: TokenArray, *, final: bool) -> None:
        """Send the next tokens of the input, waiting for credit; `final` marks the end of the input.

        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        little_endian = np.ascontiguousarray(tokens, dtype="<i4")
        done = 0
        while done < len(little_endian):
            await self._room()
            count = min(len(little_endian) - done, self._credit - self._sent, self._limits.message_tokens)
            last = final and done + count == len(little_endian)
            self._send_now(little_endian[done : done + count].tobytes(), count, final=last)
            done += count
        if final and not self._final_sent:
            self._send_now(b"", 0, final=True)

    def _send_now(self, payload: bytes, count: int, *, final: bool) -> None:
        if self._error is not None:
            raise self._error
        if self._given is not None:
            self._given.push(payload)
        if not (self._held or self._sent_again is not None):  # else it goes with what is sent again
            self._post(Tokens(request_id=self.request_id, start=self._sent, tokens=payload, final=final))
        self._sent += count
        if final:
            self._final_sent = True
            self._heard = time.monotonic()
            self._notify()

    async def _room(self) -> None:
        """Wait until there is credit and the rows that have arrived are being written."""
        since = time.monotonic()
        while self._error is None and (
            self._credit <= self._sent or self._inbox_bytes >= self._limits.inbox_soft_bytes
        ):
            if not await self._wait_until(max(since, self._heard) + self._limits.silence_seconds):
                self._check_silence(since)
        if self._error is not None:
            raise self._error

    async def next(self) -> EngineEvent:
        """The next result, in order. May be cancelled at any time without losing one.

        The engine may only be silent for so long once it has the whole input.
        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error
            deadline = self._heard + self._limits.silence_seconds if self._final_sent else None
            if not await self._wait_until(deadline):
                self._check_silence(self._heard)
        event = self._inbox.popleft()
        if isinstance(event, Rows):
            self._inbox_bytes -= len(event.vectors)
            self._notify()
        return cast(EngineEvent, event)

    def _check_silence(self, since: float) -> None:
        if time.monotonic() - max(since, self._heard) >= self._limits.silence_seconds:
            self.fail(
                EngineFailure(
                    f"the engine made no progress on this request for {self._limits.silence_seconds:g} s; "
                    "see /readyz, then send it again",
                    code=Code.ENGINE_TIMEOUT,
                )
            )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, deadline: float | None) -> bool:
        """Wait for any change; false when `deadline` (monotonic) came first."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
