"""Decoding many sessions side by side, in batches of one fixed shape, so that a session's bits do not depend on others.

The states of a batch stay stacked from token to token; they are taken apart only when sessions come or go.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch

from dist_attn.errors import EngineError
from dist_attn.generation import generator_for, sample, token_logprobs
from dist_attn.models import LanguageModel, ModelState
from dist_attn.ops import current_watch
from dist_attn.wire.messages import DecodeEntry, Drawn, SamplingSpec, SessionFault

__all__ = ["SLOTS", "DecodeSlots"]

SLOTS = 8
"""Sequences per batch, empty slots included: matmuls over fewer rows give other bits."""


@dataclass
class _Seat:
    """One session that decodes here."""

    spec: SamplingSpec
    generator: torch.Generator
    token: int = 0  # the one to feed next
    draws: int = 0
    counts: Counter[int] = field(default_factory=Counter)  # of drawn tokens that were fed; kept where penalties need it


@dataclass
class _Batch:
    sessions: tuple[int, ...]
    state: ModelState  # of SLOTS sequences


@final
class DecodeSlots:
    """The sessions that this rank draws tokens for."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._seats: dict[int, _Seat] = {}
        self._apart: dict[int, ModelState] = {}  # states that are in no batch
        self._batches: list[_Batch] = []

    def __contains__(self, session: int) -> bool:
        return session in self._seats

    def take_in(
        self,
        session: int,
        state: ModelState,
        spec: SamplingSpec,
        *,
        draws: int = 0,
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """A session whose prompt is prefilled but for its last token, or one that had `draws` tokens drawn before.

        `counts` are those of the drawn tokens that are in the state: all but the last one.
        """
        generator = generator_for(spec, session, draws)
        self._seats[session] = _Seat(spec, generator, draws=draws, counts=Counter(counts or {}))
        self._apart[session] = state

    def state_of(self, session: int) -> tuple[ModelState, int]:
        """The session's state, which does not hold the last drawn token yet, and how many were drawn."""
        draws = self._seats[session].draws
        if session in self._apart:
            return self._apart[session], draws
        batch = next(batch for batch in self._batches if session in batch.sessions)
        return batch.state.select(batch.sessions.index(session)), draws

    def forget(self, session: int) -> None:
        """Drop the session and its state; an unknown one is ignored."""
        if self._seats.pop(session, None) is None:
            return
        self._apart.pop(session, None)
        for batch in self._batches:
            if session in batch.sessions:
                self._dissolve(batch)
                return

    def draw(self, entries: Iterable[DecodeEntry]) -> list[Drawn | SessionFault]:
        """Feed each session its token and draw the next one."""
        wanted = []
        for entry in entries:
            seat = self._seats[entry.session]
            seat.token = seat.token if entry.token is None else entry.token
            if seat.draws and seat.spec.penalises:
                # Where it is fed, not where it is drawn: after a loss what counts is the token that was sent.
                seat.counts[seat.token] += 1
            wanted.append(entry.session)
        self._arrange(wanted)
        results: list[Drawn | SessionFault] = []
        for batch in self._batches:
            results += self._draw_batch(batch)
        return results

    def _draw_batch(self, batch: _Batch) -> list[Drawn | SessionFault]:
        seats = [self._seats[session] for session in batch.sessions]
        tokens = [seat.token for seat in seats] + [0] * (SLOTS - len(seats))
        token_B = torch.tensor(tokens, dtype=torch.int64, device=self._model.embedding.weight.device)
        watch = current_watch()
        if watch is not None:
            watch.rows = len(seats)
            if watch.finite is not None:
                watch.finite.first_tokens = tuple(batch.state.position_B.tolist())
        logits_BV, batch.state = self._model.step(token_B, batch.state)
        if watch is not None:
            watch.rows = None
        logits_BV = logits_BV[: len(seats)].float().cpu()
        results: list[Drawn | SessionFault] = []
        for session, seat, logits_V in zip(batch.sessions, seats, logits_BV, strict=True):
            try:
                (seat.token,) = sample(logits_V[None], [seat.spec], [seat.generator], [seat.counts])
                seat.draws += 1
                results.append(Drawn(session, seat.token, token_logprobs(logits_V, seat.token, seat.spec.logprobs)))
            except EngineError as error:
                results.append(SessionFault(session, str(error)))
        return results

    def _arrange(self, wanted: list[int]) -> None:
        """Put exactly these sessions into batches, and leave full batches as they are."""
        for batch in list(self._batches):
            if not set(batch.sessions) <= set(wanted):
                self._dissolve(batch)
        seated = {session for batch in self._batches for session in batch.sessions}
        if set(wanted) == seated:
            return
        for batch in [b for b in self._batches if len(b.sessions) < SLOTS]:
            self._dissolve(batch)
        # A key-value cache has the length of its text: only states of one shape go side by side.
        alike: dict[tuple[torch.Size, ...], list[int]] = {}
        for session in wanted:
            if session in self._apart:
                alike.setdefault(_shapes(self._apart[session]), []).append(session)
        for sessions in alike.values():
            for at in range(0, len(sessions), SLOTS):
                self._batches.append(self._stack(tuple(sessions[at : at + SLOTS])))

    def _stack(self, sessions: tuple[int, ...]) -> _Batch:
        states = [self._apart.pop(session) for session in sessions]
        return _Batch(sessions, ModelState.stack(states + states[:1] * (SLOTS - len(states))))

    def _dissolve(self, batch: _Batch) -> None:
        self._batches.remove(batch)
        for slot, session in enumerate(batch.sessions):
            if session in self._seats:
                self._apart[session] = batch.state.select(slot)


def _shapes(state: ModelState) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for layer in state.layers for tensor in layer.tensors())
