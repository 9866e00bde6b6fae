"""One piece of a session's work as the API sees it: a stored state in, tokens in, and rows, tokens and states out."""

import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

from dist_attn.wire.messages import AnyMessage, Generated, OpenSession, Rows, RowSpec, SamplingSpec
from dist_attn.wire.session_messages import (
    BeginState,
    Checkpoint,
    FinishDrawing,
    Restored,
    SessionDone,
    StateCredit,
    StatePiece,
)
from service.engine_stream import EngineStream, StreamLimits
from service.errors import EngineFailure

__all__ = ["SessionEvent", "SessionStream", "SessionWork"]

SessionEvent = Restored | Rows | Generated | Checkpoint | SessionDone
PIECE_BYTES = 1 << 20
STATE_WINDOW_BYTES = 4 << 20
"""How much of a state may be under way to this process: what its memory holds of one at most."""


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

    def message(self, request_id: str) -> OpenSession:
        """The message that opens it."""
        return OpenSession(request_id, self.begin, self.rows, self.sampling, self.checkpoint_tokens)


class SessionStream(EngineStream):
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
        super().__init__(request_id, post, forget, limits)
        self.work = work
        self._sent = work.begin.position if work.begin else 0
        self._state_credit = 0
        self._pieces: deque[bytes] = deque()
        self._coming: tuple[int, int] | None = None  # position and next byte of the state that comes

    # ---- from the port -------------------------------------------------------------------------

    def deliver_more(self, message: AnyMessage) -> None:
        """Take a message that only sessions have."""
        match message:
            case StateCredit(upto=upto):
                self._state_credit = max(self._state_credit, upto)
            case StatePiece(position=position, start=start, data=data):
                if self._coming != (position, start):
                    self.fail(EngineFailure(f"bytes from {start} of the state at {position} came out of turn"))
                    return
                self._pieces.append(data)
                self._coming = (position, start + len(data))
            case Restored() | Checkpoint() | SessionDone():
                self._inbox.append(message)
                self._ended = isinstance(message, SessionDone)

    def _ends_with(self, message: Generated) -> bool:
        return False

    # ---- from the request ----------------------------------------------------------------------

    async def restore(self, pieces: AsyncIterable[bytes]) -> None:
        """Send the bytes of the state to begin with, waiting for credit. Memory: a piece.

        Raises: ServiceError when the request failed or the engine is silent for too long; EngineFailure when the bytes
            are not as many as were announced; whatever `pieces` raises.
        """
        begin = self.work.begin
        assert begin is not None
        done = 0
        async for data in pieces:
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                await self._state_room(min(done + len(piece), begin.num_bytes))
                self._post(StatePiece(self.request_id, begin.position, done, bytes(piece)))
                done += len(piece)
        if done != begin.num_bytes:
            raise EngineFailure(f"a stored state of {begin.num_bytes} bytes was announced, and {done} came")

    async def _state_room(self, upto: int) -> None:
        await self._wait_for(lambda: self._state_credit >= upto)

    async def next(self) -> SessionEvent:  # type: ignore[override]
        """The next event, in order. May be cancelled at any time without losing one.

        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        return await super().next()  # type: ignore[return-value]

    async def snapshot(self, checkpoint: Checkpoint) -> AsyncIterator[bytes]:
        """The bytes of the stored state that was announced last, once. Memory: 4 MB at most.

        Raises: ServiceError when the request failed or the engine is silent for too long.
        """
        self._coming, taken, granted = (checkpoint.position, 0), 0, 0
        while taken < checkpoint.num_bytes:
            if granted < checkpoint.num_bytes and granted - taken <= STATE_WINDOW_BYTES // 2:
                granted = min(checkpoint.num_bytes, taken + STATE_WINDOW_BYTES)
                self._post(StateCredit(self.request_id, checkpoint.position, granted))
            await self._wait_for(lambda: bool(self._pieces))
            piece = self._pieces.popleft()
            taken += len(piece)
            yield piece

    def finish_drawing(self, drawn: int) -> None:
        """Draw no further: the session shall stand after the first `drawn` tokens of those that were drawn.

        `SessionDone.drawn` says where it ends.
        """
        self._post(FinishDrawing(self.request_id, drawn))

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        since = time.monotonic()
        while self._error is None and not condition():
            if not await self._wait_until(max(since, self._heard) + self._limits.silence_seconds):
                self._check_silence(since)
        if self._error is not None:
            raise self._error
