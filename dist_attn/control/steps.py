"""Numbered steps: turns a plan into one message per rank, and keeps account of the steps that are under way."""

from collections import deque
from dataclasses import dataclass, field

from dist_attn.control.desk import Desk
from dist_attn.control.scheduler import Block, Plan
from dist_attn.errors import WireError
from dist_attn.wire.messages import (
    CloseOp,
    DecodeEntry,
    DecodeOp,
    Op,
    OpenOp,
    PrefillOp,
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


@dataclass
class StepBook:
    """The steps of one epoch, numbered from 1 without a gap."""

    ranks: int
    epoch: int = 0
    last_k: int = 0
    under_way: deque[_UnderWay] = field(default_factory=deque)
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

    def compose(self, plan: Plan, desk: Desk, now: float) -> list[Step]:
        """The next step for every rank; takes the tokens that it needs out of the sessions.

        Decoding stands before prefill, and operations that all ranks take part in stand in the same order everywhere.
        """
        ops: list[list[Op]] = [[CloseOp(number) for number in desk.closing] for _ in range(self.ranks)]
        desk.closing.clear()
        tokens = 0
        for number in plan.opens:
            session = desk.sessions[number]
            session.opened = True
            for of_rank in ops:
                of_rank.append(OpenOp(number, session.rows, session.sampling))
        for rank, numbers in enumerate(plan.decodes):
            if numbers:
                ops[rank].append(DecodeOp([_entry(desk, number, rank) for number in numbers]))
                tokens += len(numbers)
            for number in numbers:
                if desk.sessions[number].draws_asked == 1:
                    for other in range(self.ranks):
                        if other != rank:
                            ops[other].append(CloseOp(number))
        for block in plan.blocks:
            _prefill(desk, block, ops, now)
            tokens += block.tokens
        self.last_k += 1
        self.under_way.append(_UnderWay(self.last_k, now, set(range(self.ranks))))
        self._forget_old_rates(now)
        self._rate.append((now, tokens))
        return [Step(self.epoch, self.last_k, of_rank) for of_rank in ops]

    def finish(self, done: StepDone) -> None:
        """One rank has finished a step.

        Raises: WireError if it is not the step that is due from this rank.
        """
        due = self._done[done.rank] + 1
        if done.k != due or done.k > self.last_k:
            raise WireError(f"finished step {done.k}, due was step {due} of {self.last_k}")
        self._done[done.rank] = done.k
        self.under_way[done.k - self.under_way[0].k].waiting.discard(done.rank)
        while self.under_way and not self.under_way[0].waiting:
            self.under_way.popleft()

    def tokens_per_second(self, now: float) -> float:
        """Tokens prefilled and drawn per second, over the last seconds."""
        self._forget_old_rates(now)
        return sum(tokens for _, tokens in self._rate) / RATE_WINDOW_S

    def _forget_old_rates(self, now: float) -> None:
        while self._rate and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()


def _entry(desk: Desk, number: int, rank: int) -> DecodeEntry:
    session = desk.sessions[number]
    session.draws_asked += 1
    session.owner = rank
    if session.draws_asked > 1:
        return DecodeEntry(number)
    return DecodeEntry(number, int.from_bytes(session.queue.take(1), "little"))


def _prefill(desk: Desk, block: Block, ops: list[list[Op]], now: float) -> None:
    session = desk.sessions[block.session]
    for of_rank, length in zip(ops, block.lengths, strict=True):
        of_rank.append(PrefillOp(block.session, block.start, list(block.lengths), session.queue.take(length)))
    session.dispatched += block.tokens
    session.waiting_since = now
    desk.grant(session)
    if session.rows is not None and session.prefilled:
        # Every rank may forget it now; the session itself ends when its last row has come back.
        session.opened = False
        for of_rank in ops:
            of_rank.append(CloseOp(block.session))
