"""A rank without torch whose model is plain arithmetic, and which fails in any way a test asks for by a token."""

import io
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from dist_attn.model_config.figures import GRAIN
from dist_attn.rank.worker import run_rank
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.rank_link.rows import piece_edges
from dist_attn.text.cuts import marked_ends, unmarked
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import (
    DecodeEntry,
    DecodeOp,
    Drawn,
    GuardCounts,
    LoadedModel,
    OpenOp,
    PrefillOp,
    RequestFault,
    RowPieces,
    SavedState,
)
from dist_attn.wire.snapshot import pack_snapshot, read_snapshot
from tests.support.snapshots import manifest

VOCAB, DIM, END = 1000, 4, 7
FAULT, RAISE, HANG, DIE, STOP, SLOW = 990, 991, 992, 993, 994, 995
"""Tokens that make the rank that gets them fail at the request, raise, hang, be killed, be stopped, or take 20 ms."""


def fake_hidden(tokens, start):
    """The hidden states of tokens that stand at `start` and after, [n, DIM]."""
    tokens = np.asarray(tokens, dtype=np.int64)
    positions = start + np.arange(len(tokens))
    columns = (tokens, positions % 1024, (tokens * 31 + positions * 7) % 101, np.ones_like(tokens))
    return np.stack(columns, axis=1).astype(np.float32)


def fake_next(token, counts=None, fed=()):
    """The token that is drawn after `token`; with penalties every token that was drawn before moves it, with a grammar
    also the place where it was drawn.
    """
    moved = sum(other * times for other, times in (counts or {}).items())
    return (token * 7 + 3 + moved + sum(at * other for at, other in enumerate(fed))) % 900


def fake_scores(tokens, count):
    """The scores of all these tokens but the first, [n - 1, 1 + 2 count]: of each pair of neighbours something else."""
    before, after = np.asarray(tokens[:-1]), np.asarray(tokens[1:])
    columns = [-(before * 3 + after) / 1000.0]
    columns += [(after + k) % VOCAB for k in range(count)] + [-(before + k) / 1000.0 for k in range(count)]
    return np.stack(columns, axis=1).astype("<f4")


def fake_manifest(chunk_tokens=1024, ranks=2):
    """What the states of this model say about themselves."""
    return manifest(vocab_size=VOCAB, hidden_size=DIM, mixers=["rfa"], chunk_tokens=chunk_tokens, ranks=ranks)


def fake_snapshot(position, last, described=None):
    """The stored state after `position` tokens, the last of which is known."""
    array = np.array([position, last], dtype="<i8")
    return b"".join(pack_snapshot(described or fake_manifest(), position, [("layers.0.0", array)]).pieces())


class FakeExecutor:
    """Remembers which tokens each request should be given next, and refuses a gap."""

    fatal = (RuntimeError, AssertionError)

    def __init__(self, settings: RankSettings, pulse: Pulse) -> None:
        self.rank, self.ranks = settings.rank, settings.ranks
        self.exchanges = 0
        self.rows: dict[int, RowSpec | None] = {}
        self.position: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.draws: dict[int, int] = {}
        self.counts: dict[int, Counter[int] | None] = {}
        self.fed: dict[int, list[int]] = {}  # the drawn tokens of texts that follow a grammar
        self.scored: dict[int, int | None] = {}
        self.denominators = 0
        self.kept: dict[int, bool] = {}  # requests that draw from kept logits, and whether this rank has them
        self.ended: set[int] = set()
        self.refused: set[int] = set()
        manifest = fake_manifest((settings.chunk_tokens or GRAIN) * settings.ranks, settings.ranks)
        self.loaded = LoadedModel("fake", DIM, VOCAB, (END,), None, 24, manifest, pauses=4, device="cpu")

    def open(self, op: OpenOp, state: bytes = b"") -> RequestFault | None:
        assert op.request not in self.position, "opened twice"
        self.rows[op.request], self.position[op.request] = op.rows, 0
        self.draws[op.request] = 0
        self.scored[op.request] = None if op.sampling is None else op.sampling.prompt_logprobs
        penalises = op.sampling is not None and op.sampling.penalises
        self.counts[op.request] = Counter(op.counts) if penalises else None
        self.fed.pop(op.request, None)
        if op.sampling is not None and op.sampling.grammar:
            self.fed[op.request] = np.frombuffer(op.drawn, np.int32).tolist()
        self.ended.discard(op.request)
        if op.from_logits:
            self.kept[op.request] = op.restore is not None
        if op.restore is not None and op.restore.snapshot:
            snapshot = read_snapshot(io.BytesIO(state))
            position, last = snapshot.arrays["layers.0.0"].tolist()
            if last >= VOCAB:
                self.position.pop(op.request)
                self.refused.add(op.request)
                return RequestFault(op.request, "its array has another shape", "invalid_state")
            assert position == snapshot.header.position == op.restore.position
            self.position[op.request], self.last[op.request] = position, last
            self.draws[op.request] = op.restore.draws
        elif op.restore is not None:
            position, last, draws = np.frombuffer(state, dtype="<i8").tolist()
            assert (position, draws) == (op.restore.position, op.restore.draws)
            self.position[op.request], self.last[op.request], self.draws[op.request] = position, last, draws

    def shares(self, op: object) -> bool:
        return isinstance(op, PrefillOp) and self.ranks > 1

    def refuse(self, request: int) -> None:
        self.close(request)
        self.refused.add(request)

    def save(self, request: int, snapshot: bool = False) -> tuple[SavedState, bytes] | None:
        if request in self.refused:
            return None
        if snapshot:
            assert self.kept.get(request, True), "this rank has no logits"
            state = fake_snapshot(self.position[request], self.last[request], self.loaded.manifest)
            return SavedState(request, self.position[request], self.draws[request], len(state), snapshot=True), state
        position, draws = self.position[request], self.draws[request]
        state = np.array([position, self.last.get(request, 0), draws], dtype="<i8").tobytes()
        return SavedState(request, position, draws, len(state)), state

    def read_ahead(self, ops):
        pass

    def prefill(self, op: PrefillOp, pause: Callable[[], None] = lambda: None) -> RowPieces | None:
        if op.request in self.refused:
            return None
        assert op.start == self.position[op.request], (op.start, self.position[op.request])
        self.position[op.request] += sum(op.lengths)
        tokens = np.frombuffer(op.tokens, dtype="<i4")
        assert len(tokens) == op.lengths[self.rank]
        for _ in range(self.loaded.pauses):
            pause()
        self.denominators += len(tokens)
        ends = marked_ends(tokens, op.start + sum(op.lengths[: self.rank])).tolist()
        tokens = unmarked(tokens)
        self._misbehave(set(tokens.tolist()))
        has_last = bool(len(tokens)) and not any(op.lengths[self.rank + 1 :])
        if op.request in self.kept:
            self.kept[op.request] = has_last
        if has_last:
            self.last[op.request] = int(tokens[-1])
        spec = self.rows[op.request]
        start = op.start + sum(op.lengths[: self.rank])
        if len(tokens) and (count := self.scored[op.request]) is not None:
            positions = list(range(start, start + len(tokens) + 1))
            scores = fake_scores([*tokens.tolist(), op.following], count)
            return RowPieces(op.request, positions[:-1], positions[1:], scores.tobytes())
        if spec is None or not len(tokens):
            return None
        edges = piece_edges(start, start + len(tokens), spec, ends)
        hidden = fake_hidden(tokens, start)
        if spec.pooling == "mean":
            vectors = np.stack([hidden[a - start : b - start].sum(0) for a, b in pairwise(edges)])
        else:
            vectors = hidden[edges[1:] - start - 1]
        return RowPieces(op.request, edges[:-1].tolist(), edges[1:].tolist(), vectors.astype("<f4").tobytes(), ends)

    def decode(self, op: DecodeOp) -> list[Drawn]:
        drawn = []
        for entry in op.entries:
            if entry.request in self.kept or entry.request in self.refused:
                drawn += self._draw_kept(entry)
                continue
            if entry.token is not None:
                self._misbehave({entry.token})
            fed = self.last[entry.request] if entry.token is None else entry.token
            if (counts := self.counts[entry.request]) is not None and self.draws[entry.request]:
                counts[fed] += 1
            if entry.request in self.fed and self.draws[entry.request]:
                self.fed[entry.request].append(fed)
            token = fake_next(fed, counts, self.fed.get(entry.request, ()))
            self.last[entry.request] = token
            self.position[entry.request] += 1
            self.draws[entry.request] += 1
            drawn.append(Drawn(entry.request, token))
        return drawn

    def _draw_kept(self, entry: DecodeEntry) -> list[Drawn]:
        """Draw after the last token, and feed what was drawn but for the end token."""
        request = entry.request
        if request in self.ended or request in self.refused:
            return []
        assert self.kept[request], "this rank has no logits"
        counts = self.counts[request]
        token = fake_next(self.last[request], counts)
        fed = token if entry.token is None else entry.token
        if fed == END:
            self.ended.add(request)
            return [Drawn(request, token)]
        if counts is not None:
            counts[fed] += 1
        self.last[request] = fed
        self.position[request] += 1
        self.draws[request] += 1
        return [Drawn(request, token)]

    def close(self, request: int) -> None:
        self.refused.discard(request)
        self.kept.pop(request, None)
        self.position.pop(request, None)
        self.last.pop(request, None)

    def finish_step(self) -> None:
        pass

    def take_guards(self) -> GuardCounts | None:
        """One head in one layer, which guards every denominator."""
        count, self.denominators = self.denominators, 0
        return GuardCounts(count, [[count]]) if count else None

    def shut_down(self) -> None:
        pass

    def _misbehave(self, tokens: set[int]) -> None:
        if FAULT in tokens:
            raise ValueError("the fake rank was asked to fail at a request")
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


def drawn_after(token, count, penalises=False, follows=False):
    """What the fake model draws after a prompt's last token, up to the end token."""
    tokens = []
    while len(tokens) < count:
        token = fake_next(token, Counter(tokens) if penalises else None, tokens if follows else ())
        if token == END:
            break
        tokens.append(token)
    return tokens
