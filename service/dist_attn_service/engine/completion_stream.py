"""A completion as the API sees it: tokens in, drawn tokens out, and stored states of its prompt in and out."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dist_attn.text.base import TokenArray
from dist_attn.wire.messages import AnyMessage, Generated, OpenCompletion, SamplingSpec
from dist_attn.wire.session_messages import BeginState, Checkpoint, Restored, StatesDone
from dist_attn.wire.terms import Terms
from dist_attn_service.engine.state_stream import StateStream
from dist_attn_service.engine.stream import StreamLimits

__all__ = ["CompletionStream", "CompletionWork"]


@dataclass(frozen=True)
class CompletionWork:
    """How tokens are drawn; the state that the prompt's beginning is in; where states of the prompt are wanted."""

    sampling: SamplingSpec
    begin: BeginState | None = None
    states_at: tuple[int, ...] = ()

    def message(self, request_id: str, terms: Terms) -> OpenCompletion:
        """The message that opens it."""
        return OpenCompletion(request_id, self.sampling, terms, self.begin, self.states_at)


class CompletionStream(StateStream):
    """The API's end of a completion. With a state to begin with, `restore` it and wait until it is `restored` first.

    Its states are fetched by somebody else than the one who reads its text: after `fetch_states`, who does so gets one
    by one from `next_state`, takes each whole by `snapshot`, and calls `end_states` at the end. `close` of a completion
    whose last token has come leaves the stream to them.
    """

    def __init__(
        self,
        request_id: str,
        post: Callable[[AnyMessage], None],
        forget: Callable[[str], None],
        limits: StreamLimits,
        work: CompletionWork,
    ) -> None:
        super().__init__(request_id, post, forget, limits, work.begin)
        self._with_states = bool(work.states_at)
        self._states: deque[Checkpoint] = deque()
        self._restored = False
        self._drawn = False  # the last token has come
        self._fetched = False  # somebody fetches the states
        self._closed = False

    def deliver_more(self, message: AnyMessage) -> None:
        """Take a message about states."""
        match message:
            case Restored():
                self._restored = True
            case Checkpoint():
                self._states.append(message)
            case StatesDone():
                self._ended = True
            case _:
                super().deliver_more(message)

    def _ends_with(self, message: Generated) -> bool:
        self._drawn = message.finish_reason is not None
        # While it is held its controller is gone, and so are the states.
        return self._drawn and (not self._with_states or self._held)

    def stands_for(self, tokens: TokenArray) -> None:
        """These tokens are in the state that it began with: where that is not, they have to be read."""
        if self._given is not None:
            self._given.push(np.ascontiguousarray(tokens, dtype="<i4").tobytes())

    def _can_be_done_again(self) -> bool:
        return super()._can_be_done_again() and not self._drawn and self._coming is None

    def do_again(self, request_id: str) -> None:
        """Without any stored states; those that were not fetched are not handed out any more."""
        self._with_states = False
        self._states.clear()
        super().do_again(request_id)

    async def restored(self) -> None:
        """Wait until the engine goes on from the state that it was sent.

        Raises: ServiceError when it does not take it, or the request failed otherwise.
        """
        await self._wait_for(lambda: self._restored)

    def fetch_states(self) -> None:
        """Somebody fetches the states from now on."""
        self._fetched = True

    async def next_state(self) -> Checkpoint | None:
        """The next state that can be fetched; None when there are no more.

        Raises: ServiceError when the request failed.
        """
        while not self._states and self._error is None and not (self._ended or self._closed):
            # While the prompt is read there may be nothing to say for long; that is for who reads the text to judge.
            if not await self._wait_until(time.monotonic() + self._limits.silence_seconds) and self._drawn:
                return None
        if self._error is not None:
            raise self._error
        return None if self._closed or not self._states else self._states.popleft()

    def end_states(self) -> None:
        """Nobody fetches states any more."""
        self._fetched = False
        if self._drawn:
            self.close()

    def close(self) -> None:
        """Stop listening, and have the work cancelled unless it is done; see above."""
        if self._drawn and self._fetched and self._error is None:
            return
        self._closed = True
        super().close()
        self._notify()
