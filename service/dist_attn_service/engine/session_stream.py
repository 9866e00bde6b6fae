"""One piece of a session's work as the API sees it: a stored state in, tokens in, and rows, tokens and states out."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dist_attn.wire.messages import AnyMessage, Generated, Rows, RowSpec, SamplingSpec
from dist_attn.wire.session_messages import (
    BeginState,
    Checkpoint,
    FinishDrawing,
    OpenSession,
    Restored,
    SessionDone,
)
from dist_attn.wire.terms import Terms
from dist_attn_service.engine.state_stream import StateStream
from dist_attn_service.engine.stream import StreamLimits

__all__ = ["SessionEvent", "SessionStream", "SessionWork"]

SessionEvent = Restored | Rows | Generated | Checkpoint | SessionDone


@dataclass(frozen=True)
class SessionWork:
    """What a session is gone on with: `begin` None stands for the empty state.

    Then tokens are fed, of which `rows` asks for vectors, and then `sampling` draws some; both may be None. With
    `sampling` and no tokens the first one is drawn from the logits that the state was stored with. States come back at
    multiples of `checkpoint_tokens` (0: none; rounded up to the grid of blocks) and always at the end.
    """

    begin: BeginState | None = None
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    checkpoint_tokens: int = 0
    terms: Terms = field(default_factory=Terms)

    def message(self, request_id: str) -> OpenSession:
        """The message that opens it."""
        return OpenSession(request_id, self.begin, self.rows, self.sampling, self.checkpoint_tokens, self.terms)


class SessionStream(StateStream):
    """The API's end of it. Use it as a context manager: leaving it early cancels the work.

    1. `restore` sends the state to begin with, if there is one; 2. `send` the tokens, at the end with `final=True` (if
    there are none, too); meanwhile 3. `next` gives events, `SessionDone` the last. A `Checkpoint` is followed by rows
    and drawn tokens only, until `snapshot` has taken its bytes.

    The state after drawing stands after all drawn tokens, and its logits are those after the last one. The end token is
    no part of the session.
    """

    def __init__(
        self,
        request_id: str,
        post: Callable[[AnyMessage], None],
        forget: Callable[[str], None],
        limits: StreamLimits,
        work: SessionWork,
    ) -> None:
        super().__init__(request_id, post, forget, limits, work.begin)
        self.work = work

    def deliver_more(self, message: AnyMessage) -> None:
        """Take a message that only sessions have."""
        if isinstance(message, Restored | Checkpoint | SessionDone):
            self._inbox.append(message)
            self._ended = isinstance(message, SessionDone)
        else:
            super().deliver_more(message)

    def _ends_with(self, message: Generated) -> bool:
        return False

    async def next(self) -> SessionEvent:  # type: ignore[override]
        """The next event, in order. May be cancelled at any time without losing one.

        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        return await super().next()  # type: ignore[return-value]

    def finish_drawing(self, drawn: int) -> None:
        """Draw no further: the session shall stand after the first `drawn` tokens of those that were drawn.

        `SessionDone.drawn` says where it ends.
        """
        self._post(FinishDrawing(self.request_id, drawn))
