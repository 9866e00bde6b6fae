"""States of prompts at the fake engine: a state is the tokens it stands after, in a real snapshot file."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dist_attn.errors import StateMismatchError, WireError
from dist_attn.wire.manifest import RestoreReport, require_same_model
from dist_attn.wire.messages import (
    AnyMessage,
    BeginState,
    Checkpoint,
    Done,
    Failed,
    OpenWork,
    Restored,
    StateCredit,
    StatePiece,
)
from dist_attn.wire.snapshot import SnapshotParser, pack_snapshot
from tests.support.fake_sessions import MANIFEST

__all__ = ["FakePrompts", "prompt_state"]

PIECE = 700
Tokens = npt.NDArray[np.int32]


def prompt_state(tokens: Tokens) -> bytes:
    """The stored state after these tokens."""
    arrays = [("layers.0.0", np.ascontiguousarray(tokens, dtype="<i4"))]
    return b"".join(pack_snapshot(MANIFEST, len(tokens), arrays).pieces())


@dataclass
class _Offers:
    waiting: list[tuple[int, bytes]]
    sent: int = 0


@dataclass
class FakePrompts:
    """States that completions begin with (`coming`) and that they hand out (`offers`), by request.

    `refuse` is the code that states are refused with; `mute` takes them and says nothing.
    """

    refuse: str | None = None
    mute: bool = False
    coming: dict[str, tuple[BeginState, bytearray]] = field(default_factory=dict)
    offers: dict[str, _Offers] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offers)

    def open(self, message: OpenWork) -> list[AnyMessage]:
        """Let the state come."""
        begin = message.begin
        assert begin is not None
        self.coming[message.request_id] = begin, bytearray()
        return [StateCredit(message.request_id, begin.position, begin.num_bytes)]

    def take(self, piece: StatePiece) -> tuple[Tokens | None, list[AnyMessage]]:
        """The tokens that the state stands after, once it is whole, and the answers to a piece of it."""
        begin, data = self.coming[piece.request_id]
        assert piece.start == len(data)
        data += piece.data
        if len(data) < begin.num_bytes or self.mute:
            return None, []
        del self.coming[piece.request_id]
        parser = SnapshotParser(keep=True)
        try:
            parser.feed(bytes(data))
            snapshot = parser.finish()
            require_same_model(snapshot.header.manifest.model, MANIFEST.model)
        except (WireError, StateMismatchError) as error:
            return None, [Failed(piece.request_id, "invalid_state", str(error))]
        if self.refuse is not None:
            return None, [Failed(piece.request_id, self.refuse, "refused by the test")]
        tokens = snapshot.arrays["layers.0.0"].astype(np.int32)
        assert len(tokens) == begin.position == snapshot.header.position
        return tokens, [Restored(piece.request_id, RestoreReport(begin.position, 0, True, ""))]

    def offer(self, name: str, tokens: Tokens, positions: tuple[int, ...]) -> list[AnyMessage]:
        """Announce the first of the states at these positions."""
        self.offers[name] = _Offers([(position, prompt_state(tokens[:position])) for position in positions])
        return self._announce(name)

    def fetch(self, credit: StateCredit) -> list[AnyMessage]:
        """Pieces of the state that was announced, and the next one when it is whole."""
        offers, name = self.offers[credit.request_id], credit.request_id
        position, data = offers.waiting[0]
        assert credit.position == position
        answers: list[AnyMessage] = []
        while offers.sent < min(credit.upto, len(data)):
            piece = data[offers.sent : min(credit.upto, offers.sent + PIECE)]
            answers.append(StatePiece(name, position, offers.sent, piece))
            offers.sent += len(piece)
        if offers.sent == len(data):
            offers.waiting.pop(0)
            offers.sent = 0
            answers += self._announce(name)
        return answers

    def _announce(self, name: str) -> list[AnyMessage]:
        offers = self.offers[name]
        if not offers.waiting:
            del self.offers[name]
            return [Done(name, 0, 0, 0)]
        position, data = offers.waiting[0]
        return [Checkpoint(name, position, 0, len(data))]

    def cancel(self, name: str) -> None:
        """Forget it."""
        self.coming.pop(name, None)
        self.offers.pop(name, None)
