"""Numbered steps: turns a plan into the messages of each rank, and keeps account of the steps that are under way."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dist_attn.control.desk import Desk
from dist_attn.control.pace import Pace
from dist_attn.control.scheduler import Block, Plan
from dist_attn.control.sessions import Session
from dist_attn.errors import WireError
from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.rank_messages import (
    CloseOp,
    DecodeEntry,
    DecodeOp,
    Op,
    OpenOp,
    PrefillOp,
    SaveOp,
    StatePart,
    Step,
    StepDone,
)

__all__ = ["StepBook"]

RATE_WINDOW_S = 5.0


@dataclass
class _UnderWay:
    k: int
    sent_at: float
    waiting: set[int]
    reached: list[tuple[int, int]]  # sessions, and the position after this step
    tokens: int
    rounds: int
    prefill_s: float = float("inf")
    decode_s: float = 0.0

    def finished(self, done: StepDone) -> None:
        """A rank is done; its waiting in exchanges counts as reading, so the rank that read least waited least."""
        self.waiting.discard(done.rank)
        self.prefill_s = min(self.prefill_s, done.seconds - done.decode_seconds)
        self.decode_s = max(self.decode_s, done.decode_seconds)


@dataclass
class StepBook:
    """The steps of one epoch, numbered from 1 without a gap."""

    ranks: int
    epoch: int = 0
    last_k: int = 0
    under_way: deque[_UnderWay] = field(default_factory=deque)
    pace: Pace = field(default_factory=Pace)
    _done: list[int] = field(default_factory=list)
    _rate: deque[tuple[float, int]] = field(default_factory=deque)

    def begin_epoch(self, epoch: int) -> None:
        """A fresh group: step 1 comes next."""
        self.epoch, self.last_k = epoch, 0
        self.under_way.clear()
        self._done = [0] * self.ranks

    @property
    def oldest(self) -> tuple[float, int] | None:
        """When the oldest unfinished step was sent, and its number."""
        return (self.under_way[0].sent_at, self.under_way[0].k) if self.under_way else None

    def compose(self, plan: Plan, desk: Desk, now: float) -> Iterator[tuple[int, AnyMessage]]:
        """The next step of every rank, and before it the states it begins with; takes tokens out of the sessions.

        Decoding stands before prefill, and operations that all ranks take part in stand in the same order everywhere.
        """
        ops: list[list[Op]] = [[CloseOp(number) for number in desk.closing] for _ in range(self.ranks)]
        desk.closing.clear()
        for number in plan.swaps:
            _put_aside(desk.sessions[number], ops, now)
        restores: list[tuple[int, int]] = []
        for number in plan.opens:
            restores += self._open(desk.sessions[number], plan, ops, now)
        for rank, numbers in enumerate(plan.decodes):
            if numbers:
                ops[rank].append(DecodeOp([_entry(desk, number, rank) for number in numbers]))
            for number in numbers:
                if desk.sessions[number].draws_asked == 1:
                    for other in range(self.ranks):
                        if other != rank:
                            ops[other].append(CloseOp(number))
                self._save(desk, desk.sessions[number], ops, rank, now)
        for block in plan.blocks:
            _prefill(desk, block, ops, now)
            self._save_asked(desk, desk.sessions[block.session], ops, now)
        for number in dict.fromkeys(block.session for block in plan.blocks):
            self._save(desk, desk.sessions[number], ops, number % self.ranks, now)
            _close_read(desk.sessions[number], ops)
        rounds = [
            [_round(desk, numbers, rank) for _ in range(plan.rounds)] for rank, numbers in enumerate(plan.decodes)
        ]
        for session in desk.sessions.values():
            self._save_asked(desk, session, ops, now)
        self.last_k += 1
        reached = [(block.session, block.start + block.tokens) for block in plan.blocks]
        tokens, drawing = sum(block.tokens for block in plan.blocks), 1 + plan.rounds if any(plan.decodes) else 0
        self.under_way.append(_UnderWay(self.last_k, now, set(range(self.ranks)), reached, tokens, drawing))
        self._forget_old_rates(now)
        self._rate.append((now, tokens + sum(map(len, plan.decodes)) * (1 + plan.rounds)))
        return self._messages(desk, restores, ops, rounds, [block.session for block in plan.blocks])

    def _messages(
        self,
        desk: Desk,
        restores: list[tuple[int, int]],
        ops: list[list[Op]],
        rounds: list[list[DecodeOp]],
        given: list[int],
    ) -> Iterator[tuple[int, AnyMessage]]:
        for rank, number in restores:
            start = 0
            for part in desk.states.parts(number):
                yield rank, StatePart(self.epoch, rank, number, start, part)
                start += len(part)
        for rank, of_rank in enumerate(ops):
            yield rank, Step(self.epoch, self.last_k, of_rank, rounds[rank])
        # Only now: an API process that turns out to be gone ends all of its sessions, and the step may hold several.
        for number in dict.fromkeys(given):
            if (session := desk.sessions.get(number)) is not None:
                desk.grant(session)

    def _open(self, session: Session, plan: Plan, ops: list[list[Op]], now: float) -> list[tuple[int, int]]:
        """Let the ranks begin with the session, or the one that draws for it; which of them need its saved state."""
        session.opened = session.exposed = True
        session.opened_at, session.save_asked_s = session.dispatched, now
        journal, number = session.journal, session.number
        owners = [rank for rank, numbers in enumerate(plan.decodes) if number in numbers]
        ranks = owners if journal.draws else list(range(self.ranks))
        kept = session.work is not None
        counts = dict(journal.counts) if session.sampling is not None and session.sampling.penalises else {}
        for rank in ranks:
            ops[rank].append(OpenOp(number, session.rows, session.sampling, session.saved, counts, kept))
        return [(rank, number) for rank in ranks if session.saved is not None]

    def _save(self, desk: Desk, session: Session, ops: list[list[Op]], rank: int, now: float) -> None:
        """Ask for the session's state where it has gone far since the last one that was asked for."""
        if session.work is None and not session.is_read and _has_gone_far(desk, session, now):
            session.saved_at, session.save_asked_s = (session.dispatched, session.draws_asked), now
            ops[rank].append(SaveOp(session.number, session.saves.ask()))

    def _save_asked(self, desk: Desk, session: Session, ops: list[list[Op]], now: float) -> None:
        """Ask for the state of a stored session, for a loss or to hand it out: of the rank that has its logits."""
        kept = session.work is not None and session.opened and not session.draining
        if session.awaits_save or (kept and _has_gone_far(desk, session, now)):
            rank = session.owner if session.owner is not None else session.holder
            session.saved_at, session.save_asked_s = (session.dispatched, session.draws_asked), now
            session.end_asked = session.prefilled and not session.may_draw
            ops[rank or 0].append(SaveOp(session.number, session.saves.ask(), True))

    def finish(self, done: StepDone) -> list[tuple[int, int]]:
        """One rank has finished a step; the sessions that have come further, now that all ranks have, and how far.

        Raises: WireError if it is not the step that is due from this rank.
        """
        self.check_due(done.rank, done.k)
        self._done[done.rank] = done.k
        self.under_way[done.k - self.under_way[0].k].finished(done)
        reached: list[tuple[int, int]] = []
        while self.under_way and not self.under_way[0].waiting:
            step = self.under_way.popleft()
            self.pace.learn(step.tokens, step.rounds, step.prefill_s, step.decode_s)
            reached += step.reached
        return reached

    def check_due(self, rank: int, k: int) -> None:
        """Raises: WireError if `k` is not the step that is due from this rank."""
        due = self._done[rank] + 1
        if k != due or k > self.last_k:
            raise WireError(f"finished step {k}, due was step {due} of {self.last_k}")

    def tokens_per_second(self, now: float) -> float:
        """Tokens prefilled and drawn per second, over the last seconds."""
        self._forget_old_rates(now)
        return sum(tokens for _, tokens in self._rate) / RATE_WINDOW_S

    def _forget_old_rates(self, now: float) -> None:
        while self._rate and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()


def _has_gone_far(desk: Desk, session: Session, now: float) -> bool:
    """In tokens, in draws, or in time: ranks that are lost every few seconds get on by what was saved in between."""
    if desk.model is None or desk.model.state_bytes is None:
        return False
    tokens, draws = session.saved_at
    far = session.dispatched - tokens >= desk.save_tokens or session.draws_asked - draws >= desk.save_draws
    further = session.saved_at != (session.dispatched, session.draws_asked)
    return far or (further and now - session.save_asked_s >= desk.save_every_s)


def _entry(desk: Desk, number: int, rank: int) -> DecodeEntry:
    session = desk.sessions[number]
    index = session.draws_asked
    session.draws_asked += 1
    session.owner = rank
    if session.work is not None:
        return DecodeEntry(number, session.journal.drawn(index))
    if index:
        return DecodeEntry(number, session.journal.drawn(index - 1))
    last = session.queue.take(1)
    session.journal.give(last)
    return DecodeEntry(number, int.from_bytes(last, "little"))


def _round(desk: Desk, numbers: tuple[int, ...], rank: int) -> DecodeOp:
    """One more token for those of the sessions that may draw one; where a state is wanted, it comes first."""
    sessions = [desk.sessions[number] for number in numbers]
    drawing = [session for session in sessions if session.may_draw and not session.awaits_save]
    return DecodeOp([_entry(desk, session.number, rank) for session in drawing])


def _prefill(desk: Desk, block: Block, ops: list[list[Op]], now: float) -> None:
    session = desk.sessions[block.session]
    for of_rank, length in zip(ops, block.lengths, strict=True):
        tokens = session.queue.take(length)
        session.journal.give(tokens)
        # The last token of a prompt is in no block, so there is always one that follows.
        following = None if session.scores is None else session.queue.first
        of_rank.append(PrefillOp(block.session, block.start, list(block.lengths), tokens, following))
    session.dispatched += block.tokens
    session.holder = max(rank for rank, length in enumerate(block.lengths) if length)
    session.journal.cut(session.dispatched)
    session.waiting_since = now


def _put_aside(session: Session, ops: list[list[Op]], now: float) -> None:
    """Have the session's state sent and forgotten; it goes on from there once it has come."""
    session.put_aside(now)
    ops[session.number % len(ops)].append(SaveOp(session.number, session.saves.ask()))
    for of_rank in ops:
        of_rank.append(CloseOp(session.number))


def _close_read(session: Session, ops: list[list[Op]]) -> None:
    """An encoding whose last block is given may be forgotten; the session itself ends when its last row is back."""
    if session.is_read:
        session.opened = False
        for of_rank in ops:
            of_rank.append(CloseOp(session.number))
