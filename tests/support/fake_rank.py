"""A rank without torch whose model is plain arithmetic, and which fails in any way a test asks for by a token."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from dist_attn.control.heartbeat import Pulse
from dist_attn.control.rows import piece_edges
from dist_attn.engine.rank_settings import RankSettings
from dist_attn.engine.worker import run_rank
from dist_attn.wire.messages import DecodeOp, Drawn, GuardCounts, OpenOp, PrefillOp, RowPieces, RowSpec, SavedState

VOCAB, DIM, END = 1000, 4, 7
RAISE, HANG, DIE, STOP, SLOW = 991, 992, 993, 994, 995
"""Tokens that make the rank that gets them raise, hang, be killed, be stopped, or take 20 ms."""


def fake_hidden(tokens, start):
    """The hidden states of tokens that stand at `start` and after, [n, DIM]."""
    tokens = np.asarray(tokens, dtype=np.int64)
    positions = start + np.arange(len(tokens))
    columns = (tokens, positions % 1024, (tokens * 31 + positions * 7) % 101, np.ones_like(tokens))
    return np.stack(columns, axis=1).astype(np.float32)


def fake_next(token, counts=None):
    """The token that is drawn after `token`; with penalties every token that was drawn before moves it."""
    return (token * 7 + 3 + sum(other * times for other, times in (counts or {}).items())) % 900


class FakeExecutor:
    """Remembers which tokens each session should be given next, and refuses a gap."""

    model, hidden_size, vocab_size, end_token, text_tokens = "fake", DIM, VOCAB, END, None
    state_bytes = 24
    pauses = 4

    def __init__(self, settings: RankSettings, pulse: Pulse) -> None:
        self.rank = settings.rank
        self.rows: dict[int, RowSpec | None] = {}
        self.position: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.draws: dict[int, int] = {}
        self.counts: dict[int, Counter[int] | None] = {}
        self.denominators = 0

    def open(self, op: OpenOp, state: bytes = b"") -> None:
        assert op.session not in self.position, "opened twice"
        self.rows[op.session], self.position[op.session] = op.rows, 0
        self.draws[op.session] = 0
        penalises = op.sampling is not None and op.sampling.penalises
        self.counts[op.session] = Counter(op.counts) if penalises else None
        if op.restore is not None:
            position, last, draws = np.frombuffer(state, dtype="<i8").tolist()
            assert (position, draws) == (op.restore.position, op.restore.draws)
            self.position[op.session], self.last[op.session], self.draws[op.session] = position, last, draws

    def save(self, session: int) -> tuple[SavedState, bytes]:
        position, draws = self.position[session], self.draws[session]
        state = np.array([position, self.last.get(session, 0), draws], dtype="<i8").tobytes()
        return SavedState(session, position, draws, len(state)), state

    def prefill(self, op: PrefillOp, pause: Callable[[], None] = lambda: None) -> RowPieces | None:
        assert op.start == self.position[op.session], (op.start, self.position[op.session])
        self.position[op.session] += sum(op.lengths)
        tokens = np.frombuffer(op.tokens, dtype="<i4")
        assert len(tokens) == op.lengths[self.rank]
        for _ in range(self.pauses):
            pause()
        self.denominators += len(tokens)
        self._misbehave(set(tokens.tolist()))
        spec = self.rows[op.session]
        if spec is None or not len(tokens):
            return None
        start = op.start + sum(op.lengths[: self.rank])
        edges = piece_edges(start, start + len(tokens), spec)
        hidden = fake_hidden(tokens, start)
        if spec.pooling == "mean":
            vectors = np.stack([hidden[a - start : b - start].sum(0) for a, b in pairwise(edges)])
        else:
            vectors = hidden[edges[1:] - start - 1]
        return RowPieces(op.session, edges[:-1].tolist(), edges[1:].tolist(), vectors.astype("<f4").tobytes())

    def decode(self, op: DecodeOp) -> list[Drawn]:
        drawn = []
        for entry in op.entries:
            if entry.token is not None:
                self._misbehave({entry.token})
            fed = self.last[entry.session] if entry.token is None else entry.token
            if (counts := self.counts[entry.session]) is not None and self.draws[entry.session]:
                counts[fed] += 1
            token = fake_next(fed, counts)
            self.last[entry.session] = token
            self.position[entry.session] += 1
            self.draws[entry.session] += 1
            drawn.append(Drawn(entry.session, token))
        return drawn

    def close(self, session: int) -> None:
        self.position.pop(session, None)
        self.last.pop(session, None)

    def take_guards(self) -> GuardCounts | None:
        """One head in one layer, which guards every denominator."""
        count, self.denominators = self.denominators, 0
        return GuardCounts(count, [[count]]) if count else None

    def shut_down(self) -> None:
        pass

    def _misbehave(self, tokens: set[int]) -> None:
        if RAISE in tokens:
            raise RuntimeError("the fake rank was asked to fail")
        if HANG in tokens:
            time.sleep(3600)
        if DIE in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if STOP in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)
        if SLOW in tokens:
            time.sleep(0.02)


if __name__ == "__main__":
    if os.path.exists(os.environ.get("FAKE_RANK_CRASHES", "")):
        sys.exit("the fake rank was asked to crash at its start")
    sys.exit(run_rank(RankSettings.from_flags(sys.argv[1:]), FakeExecutor))
