"""Sessions of an engine that answers at once: it draws a given text over and over, and its states hold nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dist_attn.wire.manifest import Computation, Manifest, ModelIdentity, RestoreReport
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Checkpoint,
    Credit,
    Done,
    Generated,
    OpenWork,
    Restored,
    StateCredit,
    StatePiece,
    Tokens,
)
from dist_attn.wire.snapshot import pack_snapshot

__all__ = ["InstantSessions"]

CREDIT = 1 << 16


@dataclass
class _Open:
    work: OpenWork
    position: int = 0
    read: int = 0  # bytes of the state that it begins with
    drawn: int = 0
    offered: bytes = b""
    sent: int = 0


@dataclass
class InstantSessions:
    """Draws the tokens of `text` in turn, one in each message, as many as are asked for; nothing stops it before."""

    hidden_size: int
    vocab_size: int
    text: Sequence[int]
    drawn: int = 0
    _open: dict[str, _Open] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """Whose states these are."""
        nothing = "00" * 32
        model = ModelIdentity(
            weights=nothing,
            config=nothing,
            tokeniser=None,
            features=nothing,
            feature_seed=0,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            mixers=["rfa_gate"],
        )
        computed = Computation(
            chunk_tokens=512,
            decode_slots=8,
            ranks=1,
            threads=1,
            device="cpu",
            denormals_flushed=True,
            library_version="0",
            torch_version="0",
        )
        return Manifest(model, computed)

    def answers(self, message: AnyMessage) -> Iterator[AnyMessage]:
        """What is said to a message, nothing to one of a session that is not open."""
        match message:
            case OpenWork(kind="session", request_id=name, begin=begin):
                self._open[name] = _Open(message, begin.position if begin else 0)
                yield Accepted(name)
                yield StateCredit(name, begin.position, begin.num_bytes) if begin else Credit(name, CREDIT)
            case Cancel(request_id=name):
                self._open.pop(name, None)
            case StatePiece(request_id=name) if name in self._open:
                yield from self._restore(name, self._open[name], len(message.data))
            case Tokens(request_id=name) if name in self._open:
                yield from self._read(name, self._open[name], len(message.tokens) // 4, message.final)
            case StateCredit(request_id=name) if name in self._open:
                yield from self._hand_out(name, self._open[name], message.upto)

    def _restore(self, name: str, session: _Open, size: int) -> Iterator[AnyMessage]:
        session.read += size
        if session.work.begin is not None and session.read >= session.work.begin.num_bytes:
            yield Restored(name, RestoreReport(session.position, 0, True, ""))
            yield Credit(name, session.position + CREDIT)

    def _read(self, name: str, session: _Open, count: int, final: bool) -> Iterator[AnyMessage]:
        session.position += count
        if not final:
            yield Credit(name, session.position + CREDIT)
            return
        asked = session.work.draw.max_tokens if session.work.draw is not None else 0
        for number in range(1, asked + 1):
            token = self.text[self.drawn % len(self.text)]
            self.drawn += 1
            yield Generated(name, [token], "length" if number == asked else None)
        session.drawn = asked
        session.position += asked
        logits = [("logits", np.zeros(self.vocab_size, np.float32))]
        session.offered = b"".join(pack_snapshot(self.manifest, session.position, logits).pieces())
        yield Checkpoint(name, session.position, session.drawn, len(session.offered))

    def _hand_out(self, name: str, session: _Open, upto: int) -> Iterator[AnyMessage]:
        piece = session.offered[session.sent : upto]
        if piece:
            yield StatePiece(name, session.position, session.sent, piece)
            session.sent += len(piece)
        if session.offered and session.sent == len(session.offered):
            del self._open[name]
            yield Done(name, session.position, session.drawn, 0)
