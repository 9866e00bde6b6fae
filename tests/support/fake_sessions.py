"""Sessions of the fake engine: a state is a number that every token changes, stored in a real snapshot file."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dist_attn.errors import StateDamagedError, StateMismatchError, WireError
from dist_attn.wire.manifest import RestoreReport, require_same_model, why_other_bits
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Checkpoint,
    Credit,
    Done,
    Failed,
    FinishDrawing,
    Generated,
    OpenWork,
    Restored,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.snapshot import SnapshotParser, pack_snapshot
from tests.support.fake_rows import RowMaker
from tests.support.fake_store import FakeStore
from tests.support.snapshots import manifest

__all__ = [
    "END",
    "GRID",
    "MANIFEST",
    "SESSION_CREDIT",
    "VOCAB",
    "FakeSessions",
    "after",
    "drawn_from",
    "refusal_of",
    "stored",
]

VOCAB = 257
END = VOCAB - 1
GRID = 512
MANIFEST = manifest(vocab_size=VOCAB, mixers=["rfa_gate"], hidden_size=8, chunk_tokens=GRID)
SESSION_CREDIT = 4096


def after(number: int, tokens) -> int:
    """The state's number after these tokens; the empty state's is 0."""
    for token in tokens:
        number = (number * 33 + int(token) + 1) % (1 << 61)
    return number


def drawn_from(number: int, count: int) -> list[int]:
    """The tokens that are drawn from a state."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(number % 250)
        number = after(number, tokens[-1:])
    return tokens


def stored(number: int, position: int) -> bytes:
    """The snapshot of a state."""
    arrays = [("logits", np.full(VOCAB, number % 1000, np.float32)), ("layers.0.0", np.array([number], np.int64))]
    return b"".join(pack_snapshot(MANIFEST, position, arrays).pieces())


def refusal_of(error: Exception) -> str:
    """The code of a request that cannot begin with its state."""
    if isinstance(error, StateDamagedError):
        return "state_damaged"
    return "invalid_state" if isinstance(error, WireError) else "state_mismatch"


@dataclass
class _Session:
    opened: OpenWork
    number: int = 0
    position: int = 0
    drawn: int = 0
    waiting: deque[AnyMessage] = field(default_factory=deque)  # to be said
    rows: RowMaker | None = None
    credit: int = SESSION_CREDIT
    granted: int = 0


class FakeSessions:
    """Answers the messages of sessions; `end_after` draws the end token after so many, `read` counts tokens."""

    def __init__(self) -> None:
        self.end_after: int | None = None
        self.read = 0
        self.store = FakeStore()
        self._open: dict[str, _Session] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    def open(self, message: OpenWork, credit: int = SESSION_CREDIT) -> list[AnyMessage]:
        """A session begins, with so much credit beyond what has come."""
        name, begin = message.request_id, message.begin
        self._open[name] = session = _Session(message, credit=credit)
        if message.rows is not None:
            session.rows = RowMaker(name, message.rows, 0 if begin is None else begin.position)
        answers: list[AnyMessage] = [Accepted(name)]
        if begin is not None:
            session.position = begin.position
            return answers + self._begin(session)
        session.granted = credit
        return [*answers, Credit(name, credit)]

    def handle(self, message: AnyMessage, *, stingy: bool = False, fail_at: int | None = None) -> list[AnyMessage]:
        """The answers to any further message of a session."""
        session = self._open[message.request_id]
        match message:
            case Tokens():
                if fail_at is not None and session.position + len(message.tokens) // 4 >= fail_at:
                    del self._open[message.request_id]
                    return [Failed(message.request_id, "engine_failed", "rank 1 died")]
                return self._tokens(session, message, stingy)
            case FinishDrawing():
                return []  # everything is drawn at once here
        raise TypeError(f"the API never sends {message!r}")

    def cancel(self, name: str) -> None:
        """Forget it."""
        self._open.pop(name, None)

    def _begin(self, session: _Session) -> list[AnyMessage]:
        """The session goes on from its stored state, or fails."""
        name, begin, parser = session.opened.request_id, session.opened.begin, SnapshotParser(keep=True)
        assert begin is not None
        try:
            parser.feed(self.store.get(begin))
            snapshot = parser.finish()
            require_same_model(snapshot.header.manifest.model, MANIFEST.model)
            if snapshot.header.position != begin.position:
                raise WireError(f"the state stands at {snapshot.header.position}, not at {begin.position}")
        except (WireError, StateMismatchError, StateDamagedError) as error:
            del self._open[name]
            return [Failed(name, refusal_of(error), str(error))]
        session.number = int(snapshot.arrays["layers.0.0"][0])
        reason = why_other_bits(snapshot.header.manifest.computed, MANIFEST.computed)
        session.granted = begin.position + session.credit
        return [Restored(name, RestoreReport(begin.position, 0, not reason, reason)), Credit(name, session.granted)]

    def _tokens(self, session: _Session, message: Tokens, stingy: bool) -> list[AnyMessage]:
        name, every = message.request_id, -(-session.opened.keep.every // GRID) * GRID
        assert message.start == session.position
        tokens = np.frombuffer(message.tokens, "<i4")
        self.read += len(tokens)
        while len(tokens):  # as a state is handed out behind the rows before it
            count = every - session.position % every if every else len(tokens)
            part, tokens = tokens[:count], tokens[count:]
            if session.rows is not None:
                session.waiting += session.rows.push(part, message.final and not len(tokens))
            for token in part:
                self._feed(session, int(token), every)
        if session.rows is not None and message.final and not len(message.tokens):
            session.waiting += session.rows.push(np.empty(0, np.int32), True)
        if not message.final:
            session.granted = session.granted if stingy else session.position + session.credit
            return [Credit(name, session.granted), *self._answers(session)]
        sampling = session.opened.draw
        if sampling is not None:
            if not session.position:
                del self._open[name]
                return [Failed(name, "empty_input", "there are no tokens to draw after")]
            tokens = drawn_from(session.number, sampling.max_tokens)[: self.end_after]
            for token in tokens:
                session.drawn += 1
                length = session.drawn == sampling.max_tokens
                told = None if sampling.logprobs is None else [TokenLogprobs(-0.5)]
                session.waiting.append(Generated(name, [token], "length" if length else None, told))
                self._feed(session, token, every)
            if len(tokens) < sampling.max_tokens:
                session.waiting.append(Generated(name, [], "stop"))
        if not every or session.position % every:
            self._checkpoint(session)
        session.waiting.append(Done(name, session.position, session.drawn, session.rows.rows if session.rows else 0))
        return self._answers(session)

    def _feed(self, session: _Session, token: int, every: int) -> None:
        session.number = after(session.number, [token])
        session.position += 1
        if every and session.position % every == 0:
            self._checkpoint(session)

    def _checkpoint(self, session: _Session) -> None:
        blob = self.store.put(stored(session.number, session.position))
        session.waiting.append(Checkpoint(session.opened.request_id, session.position, session.drawn, *blob))

    def _answers(self, session: _Session) -> list[AnyMessage]:
        """What is to be said."""
        answers = list(session.waiting)
        session.waiting.clear()
        if answers and isinstance(answers[-1], Done):
            del self._open[session.opened.request_id]
        return answers
