"""A request in the engine that stored states travel with: one to begin with goes in, those that came of it come out."""

import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable

from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.session_messages import BeginState, Checkpoint, StateCredit, StatePiece
from dist_attn_service.base.errors import EngineFailure
from dist_attn_service.engine.stream import EngineStream, StreamLimits

__all__ = ["StateStream"]

PIECE_BYTES = 1 << 20
STATE_WINDOW_BYTES = 4 << 20
"""How much of a state may be under way to this process: what its memory holds of one at most."""


class StateStream(EngineStream):
    """The API's end of such a request; `begin` is the state that it begins with."""

    def __init__(
        self,
        request_id: str,
        post: Callable[[AnyMessage], None],
        forget: Callable[[str], None],
        limits: StreamLimits,
        begin: BeginState | None,
    ) -> None:
        super().__init__(request_id, post, forget, limits)
        self.begin = begin
        self._sent = begin.position if begin else 0
        self._state_credit = 0
        self._pieces: deque[bytes] = deque()
        self._coming: tuple[int, int] | None = None  # position and next byte of the state that comes

    def deliver_more(self, message: AnyMessage) -> None:
        """Take a message about states."""
        match message:
            case StateCredit(upto=upto):
                self._state_credit = max(self._state_credit, upto)
            case StatePiece(position=position, start=start, data=data):
                if self._coming != (position, start):
                    self.fail(EngineFailure(f"bytes from {start} of the state at {position} came out of turn"))
                    return
                self._pieces.append(data)
                self._coming = (position, start + len(data))

    async def restore(self, pieces: AsyncIterable[bytes]) -> None:
        """Send the bytes of the state to begin with, waiting for credit. Memory: a piece.

        Raises: ServiceError when the request failed or the engine is silent for too long; EngineFailure when the bytes
            are not as many as were announced; whatever `pieces` raises.
        """
        begin = self.begin
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
        self._coming = None

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises: ServiceError when the request failed or has ended, or the engine is silent for too long."""
        since = time.monotonic()
        while self._error is None and not condition():
            if self._ended:  # nothing more is delivered, also where it was closed by another task
                raise EngineFailure("the request ended before all of its stored state had come")
            if not await self._wait_until(max(since, self._heard) + self._limits.silence_seconds):
                self._check_silence(since)
        if self._error is not None:
            raise self._error
