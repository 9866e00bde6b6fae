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
    Tokens,
)
from dist_attn.wire.snapshot import pack_snapshot
from tests.support.fake_store import FakeStore

__all__ = ["InstantSessions"]

CREDIT = 1 << 16


@dataclass
class _Open:
    work: OpenWork
    position: int = 0


@dataclass
class InstantSessions:
    """Draws the tokens of `text` in turn, one in each message, as many as are asked for; nothing stops it before."""

    hidden_size: int
    vocab_size: int
    text: Sequence[int]
    store: FakeStore = field(default_factory=FakeStore)
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
                if begin is not None:
                    yield Restored(name, RestoreReport(begin.position, 0, True, ""))
                yield Credit(name, CREDIT if begin is None else begin.position + CREDIT)
            case Cancel(request_id=name):
                self._open.pop(name, None)
            case Tokens(request_id=name) if name in self._open:
                yield from self._read(name, self._open[name], len(message.tokens) // 4, message.final)

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
        session.position += asked
        logits = [("logits", np.zeros(self.vocab_size, np.float32))]
        blob = self.store.put(b"".join(pack_snapshot(self.manifest, session.position, logits).pieces()))
        yield Checkpoint(name, session.position, asked, *blob)
        del self._open[name]
        yield Done(name, session.position, asked, 0)
