"""One request as the API sees it: tokens out as far as credit allows, results in through a bounded inbox."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import final

import msgspec
import numpy as np

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import (
    AnyMessage,
    BeginState,
    Cancel,
    Checkpoint,
    Credit,
    Done,
    Failed,
    FinishDrawing,
    Generated,
    Keep,
    OpenWork,
    Progress,
    Restored,
    Rows,
    Tokens,
)
from dist_attn_service.base.errors import Code, EngineFailure, EngineUnavailable, ServiceError, engine_error
from dist_attn_service.base.tasks import Changes
from dist_attn_service.base.tracing import EngineTrace, engine_trace
from dist_attn_service.engine.resending import EngineEvent, GivenMemory, Inbox, SentTokens

MOST_BREAKS = 3


@dataclass(frozen=True)
class StreamLimits:
    """The bounds on what one request may have under way and on how long the engine may be silent.

    Units: bytes, tokens, seconds.
    """

    silence_seconds: float = 300
    message_tokens: int = 16_384
    inbox_soft_bytes: int = 16 << 20
    inbox_hard_bytes: int = 256 << 20
    resend_bytes: int = 16 << 20
    resend_seconds: float = 30


@final
class EngineStream(AbstractContextManager["EngineStream"]):
    """The API's end of one request. Use it as a context manager: leaving it early cancels the work.

    1. `send` the tokens, at the end with `final=True` (if there are none, too); meanwhile 2. `next` gives events, None
    after the last. A `Checkpoint` names a state that the engine has stored.

    States of a completion's prompt (`keep.at`) go to `on_state`, beside its text. After the last token `close` leaves
    the stream open until the engine has said that there are no more.

    `post` hands a message to the controller and never waits; `forget` ends the delivery of messages; `discard` gets
    the states that nobody will take. Work that ends with no state outlives its controller, with several engines a
    session's too: the port has it `hold`, and `do_again` with the next one, or another engine's.
    """

    def __init__(
        self,
        work: OpenWork,
        post: Callable[[AnyMessage], None],
        forget: Callable[[str], None],
        discard: Callable[[Checkpoint], None],
        limits: StreamLimits,
        memory: GivenMemory,
    ) -> None:
        self.request_id = work.request_id
        self.trace = engine_trace(work.kind)
        self._work = work
        self._post = post
        self._forget = forget
        self.discard = discard
        self._limits = limits
        self._opened_at = self._heard = time.monotonic()
        self._inbox = Inbox(limits.inbox_hard_bytes)
        start = work.begin.position if work.begin else 0
        stays = work.keep.end and (work.rows is not None or not memory.several)  # a job goes on from its own state
        given, kept_from = None if stays else memory, start if work.keep.end else 0
        self._tokens = SentTokens(start, given, limits.message_tokens, self._send_tokens, kept_from)
        self._retryable_codes = (Code.STOPPING, Code.ENGINE_NOT_READY) if memory.several else (Code.STOPPING,)
        self._several = memory.several
        self._breaks = self._done = 0  # engines lost since more than this was done
        self._lost_at = -math.inf  # when the engine that had it, or was to have it, was found to be gone
        self._finish_at: int | None = None
        self._accepted = False
        self._restored = work.begin is None  # or there is nothing to restore
        self._drawn = False  # the last token of a completion has come
        self._ended = False
        self._error: ServiceError | None = None
        self._closed = False  # by its reader; it may stay open for states
        self._changed = Changes()
        self.bound = False
        """True where it is to have no other model, as it is one of several of a request."""
        self.recorded = True
        """False while the store may still let go of the bytes of the state that another controller would begin with."""
        self.on_state: Callable[[Checkpoint], None] | None = None
        """Takes the states of a completion's prompt; None: they are not waited for, and discarded."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sent(self) -> int:
        """The position after the last token that was sent, those in the state to begin with included."""
        return self._tokens.sent

    @property
    def final_sent(self) -> bool:
        """Return whether the last token has been sent."""
        return self._tokens.final

    def close(self) -> None:
        """Stop listening, and cancel the request unless it has ended; the class says when it stays open."""
        for state in self._inbox.clear():
            self.discard(state)
        self._closed = True
        if not self._drawn or self._ended or self._error is not None:
            self._leave()

    def _leave(self) -> None:
        self._forget(self.request_id)
        trace, self.trace = self.trace, EngineTrace()
        trace.ended(self.sent, str(self._error.code) if self._error else "" if self._ended else "cancelled")
        self._tokens.forget()
        if not self._ended:
            self._ended = True
            self._post(Cancel(request_id=self.request_id))
        self._changed.notify()

    # ---- from the port -------------------------------------------------------------------------

    def deliver(self, message: AnyMessage) -> None:
        """Take one message of the controller; called by the port's reader, never waits."""
        if self._ended:
            if isinstance(message, Checkpoint):
                self.discard(message)
            return
        if isinstance(message, Credit) and message.upto <= self._tokens.credit:
            return  # the controller only asks if this process is alive: no progress
        if isinstance(message, Rows | Generated | Progress | Done):
            self.trace.worked()
        try:
            self._take(message)
        except ServiceError as error:
            self.fail(error)
        self._accepted = self._accepted or not self.held
        self._heard = time.monotonic()
        self._changed.notify()

    def _take(self, message: AnyMessage) -> None:
        """Act on a message. Raises: ServiceError for one that ends the request."""
        match message:
            case Credit(upto=upto):
                self._tokens.grant(upto)
            case Failed(code=code) if code in self._retryable_codes and self.hold(broke=False):
                pass  # the controller ends: the next one goes on
            case Failed(code=Code.OVERLOADED) if self._several and self._waits_on():
                self._tokens.hold()
            case Failed(code=code, message=text, retry_after_s=wait):
                self._ended = True
                self._error = engine_error(code, text, wait)
            case Progress() | Rows():
                self._inbox.put(message)
            case Generated(finish_reason=reason):
                self._inbox.put(message)
                self._drawn = reason is not None and not self._work.keep.end
                # While the stream is held its controller is gone, and so are the states.
                self._ended = self._drawn and (self.on_state is None or self._tokens.held)
            case Restored(report=report):
                # Another engine's report on a state of the work's own says nothing of the one that it began with.
                if self._work.keep.end and not (self._restored and report.bit_exact):
                    self._inbox.put(message)
                self._restored = True
            case Checkpoint() if self._work.keep.end:
                self._begin_at(message)
                self._inbox.put(message)
            case Checkpoint() if self.on_state is not None:
                self.on_state(message)
            case Checkpoint():
                self.discard(message)
            case Done():
                self._ended = True
                if not self._drawn:  # else its tokens were the last that its reader waits for
                    self._inbox.put(message)
        if self._closed and self._ended:
            self._leave()

    def fail(self, error: ServiceError) -> None:
        """End the stream with an error that did not come from the controller."""
        if self._error is None and not self._ended:
            self._error = error
            self._changed.notify()
            if self._closed:
                self._leave()

    # ---- when the controller dies --------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Return whether it waits for another controller. A late message of the old one may still end it."""
        return self._tokens.held and not self._ended and self._error is None

    def hold(self, *, broke: bool = True) -> bool:
        """Wait for another controller, as this one is gone. Return False where another could not do the work again.

        Of several engines a few may break on it, where nothing comes of it meanwhile; then it ends with an error.
        """
        if self._ended or self._error is not None or self._tokens.held:
            return True
        if self._drawn or not self._tokens.whole:
            return False
        self._tokens.hold()
        self._lost_at = time.monotonic()
        self.trace.told("controller lost")
        done = self._tokens.done + self._inbox.come
        self._breaks, self._done = broke + self._breaks * (done == self._done), done
        if self._several and self._breaks > MOST_BREAKS:
            words = f"{self._breaks} engines in turn were lost at work on this request, which may be the cause"
            self.fail(EngineFailure(f"{words}; do not send it again as it is"))
        return True

    def _waits_on(self) -> bool:
        """Return whether work that has lost its engine, and that another has no room for, has time left to wait."""
        return self._tokens.whole and time.monotonic() - self._lost_at < self._limits.resend_seconds

    @property
    def any_model(self) -> bool:
        """Return whether an engine of any model may do the work again: nothing has come, and no session's state."""
        return not self.bound and not self._inbox.come and not (self._work.keep.end and self._work.begin)

    def _begin_at(self, state: Checkpoint) -> None:
        """Let another controller begin an append with its newest stored state, unless that is the end of it."""
        at, work = state.position, self._work
        if state.blob and work.draw is None and work.rows is None and not (self.final_sent and at == self.sent):
            begin = BeginState(at, state.blob, state.digest, state.num_bytes)
            self._work, self.recorded = msgspec.structs.replace(work, begin=begin), False
            self._tokens.begin_at(at)

    def recorded_as(self, state: BeginState) -> None:
        """Name a state as the store has recorded it: bytes that it had already are kept where they were."""
        begin = self._work.begin
        if begin is not None and begin.digest == state.digest:
            self._work, self.recorded = msgspec.structs.replace(self._work, begin=state), True

    def do_again(
        self, request_id: str, post: Callable[[AnyMessage], None] | None, forget: Callable[[str], None]
    ) -> None:
        """Have another controller do the work from its beginning, under a new id; results are not delivered twice.

        `post` is the new one's, None where it is at the old one's address: then messages that were on their way to the
        old controller may reach it, so the old id is cancelled first. No further states of a prompt are stored.
        """
        self._post(Cancel(self.request_id))
        self._forget(self.request_id)
        self.request_id, self._post, self._forget = request_id, post or self._post, forget
        self.on_state = None
        terms = self._work.terms
        if terms.deadline_s is not None:  # it counts from the request's first opening
            left = max(0.001, terms.deadline_s - (time.monotonic() - self._opened_at))
            terms = msgspec.structs.replace(terms, deadline_s=left)
        work = msgspec.structs.replace(self._work, request_id=request_id, terms=terms)
        if not work.keep.end:
            work = msgspec.structs.replace(work, begin=None, keep=Keep())
            self._restored = True  # nothing is left to restore
        try:
            self._tokens.begin_again()
        except ServiceError as error:
            self.fail(error)
            return
        self._inbox.begin_again()
        self._heard = time.monotonic()
        self._post(work)
        if self._finish_at is not None:
            self.finish_drawing(self._finish_at)
        self.trace.told("another controller")
        if not self.sent:
            self._tokens.send_again()
        self._changed.notify()

    def stands_for(self, tokens: TokenArray) -> None:
        """Keep the tokens that the state to begin with stands for: another controller has to read them."""
        self._tokens.remember(np.ascontiguousarray(tokens, dtype="<i4").tobytes())

    # ---- from the request ----------------------------------------------------------------------

    async def admitted(self, within_seconds: float) -> None:
        """Wait until the controller has taken the request.

        Raises: ServiceError when it refuses, goes away, or does not answer in time.
        """
        deadline = time.monotonic() + within_seconds
        while not self._accepted and self._error is None:
            if self._tokens.held:
                deadline = time.monotonic() + within_seconds
            if not await self._changed.wait(deadline) and not (self._accepted or self._tokens.held):
                raise EngineUnavailable(
                    f"the engine's controller did not answer a new request within {within_seconds:g} s",
                    code=Code.ENGINE_UNREACHABLE,
                )
        self._check()

    async def send(self, tokens: TokenArray, *, final: bool) -> None:
        """Send the next tokens of the input, waiting for credit; `final` marks the end of the input.

        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        little_endian = np.ascontiguousarray(tokens, dtype="<i4")
        done = 0
        while done < len(little_endian):
            # until there is credit, and what has arrived is being taken
            await self._until(lambda: self._tokens.room > 0 and self._inbox.has_room(self._limits.inbox_soft_bytes))
            count = min(len(little_endian) - done, self._tokens.room, self._limits.message_tokens)
            last = final and done + count == len(little_endian)
            self._send_now(little_endian[done : done + count].tobytes(), final=last)
            done += count
        if final and not self.final_sent:
            self._send_now(b"", final=True)

    def _send_now(self, payload: bytes, *, final: bool) -> None:
        self._check()
        self._tokens.push(payload, final=final)
        if final:
            self._heard = time.monotonic()
            self._changed.notify()

    def _send_tokens(self, start: int, payload: bytes, final: bool) -> None:
        self._post(Tokens(self.request_id, start, payload, final))

    def finish_drawing(self, drawn: int) -> None:
        """Draw no further: the session shall stand after the first `drawn` tokens of those that were drawn.

        `Done.drawn` says where it ends.
        """
        self._finish_at = drawn
        self._post(FinishDrawing(self.request_id, drawn))

    async def next(self) -> EngineEvent | None:
        """The next result, in order; None after the last. May be cancelled at any time without losing one.

        The silence of the engine is bounded once it has the whole input.
        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        await self._until(lambda: bool(self._inbox) or self._drawn or self._ended, owed=lambda: self.final_sent)
        if not self._inbox:
            self._check()
            return None
        event = self._inbox.take()
        self._changed.notify()  # there may be room for more tokens
        return event

    async def restored(self) -> None:
        """Wait until the engine has restored the state that it was sent.

        Raises: ServiceError when it does not take it, or the request failed otherwise.
        """
        await self._until(lambda: self._restored)

    # ---- waiting -------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises: ServiceError when the request failed."""
        if self._error is not None:
            raise self._error

    async def _until(self, condition: Callable[[], bool], *, owed: Callable[[], bool] = lambda: True) -> None:
        """Wait for a condition; while something is `owed` the engine's silence is bounded by `silence_seconds`.

        Raises: ServiceError when the request failed or has ended before, or the engine is silent for too long.
        """
        since = time.monotonic()
        while not condition():
            self._check()
            if self._ended:  # nothing more is delivered, also where it was closed by another task
                raise EngineFailure("the request ended before all of it was done")
            quiet = max(since, self._heard)
            deadline = quiet + self._limits.silence_seconds if owed() else None
            if not await self._changed.wait(deadline) and quiet >= self._heard:
                seconds = self._limits.silence_seconds
                self.fail(
                    EngineFailure(
                        f"the engine made no progress on this request for {seconds:g} s; "
                        "see /readyz, then send it again",
                        code=Code.ENGINE_TIMEOUT,
                    )
                )
