"""Numbered steps: turning a plan into each rank's messages, keeping account of what is under way, learning the pace."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.scheduler import ScheduledBlock, StepPlan
from dist_attn.control.states import States
from dist_attn.errors import WireError
from dist_attn.model_config.figures import GRAIN
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

RATE_WINDOW_S = 5.0
WEIGHT = 0.2  # of the newest step in the moving averages


@final
@dataclass
class Pace:
    """Moving averages over steps; 0 for what has not been seen yet. Units: seconds."""

    token_s: float = 0.0
    """The seconds to read one token, all ranks working together."""
    round_s: float = 0.0
    """The seconds of one round of decoding: a token for every request that decodes, on the rank that takes longest."""

    def learn(self, tokens: int, rounds: int, prefill_s: float, decode_s: float) -> None:
        """Learn from a step of all ranks that read `tokens` and decoded for `rounds`, in so many seconds each.

        What reads less than a grain says more about what every block costs than about a token, and is left out.
        """
        if tokens >= GRAIN and prefill_s > 0:
            self.token_s = _moved(self.token_s, prefill_s / tokens)
        if rounds and decode_s > 0:
            self.round_s = _moved(self.round_s, decode_s / rounds)


def _moved(before: float, newest: float) -> float:
    return newest if not before else before + WEIGHT * (newest - before)


@final
class _Orders:
    """The orders of one step. Operations that all ranks take part in stand in the same order everywhere."""

    def __init__(self, ranks: int, requests: OpenRequests, states: States, now: float, all_decode: bool) -> None:
        self._all_decode = all_decode
        self._requests = requests
        self._states = states
        self._now = now
        self.ops: list[list[Op]] = [[] for _ in range(ranks)]
        self.rounds: list[list[DecodeOp]] = [[] for _ in range(ranks)]
        self.restores: list[tuple[int, int]] = []
        """The ranks, and the requests whose saved state they begin with."""

    def to_all(self, op: Op) -> None:
        for of_rank in self.ops:
            of_rank.append(op)

    def put_aside(self, request: Request) -> None:
        """Have the request's state sent and forgotten; it goes on from there once it has come."""
        ordinal = request.keeping.swap_out(request.here, self._now)
        self.ops[request.number % len(self.ops)].append(SaveOp(request.number, ordinal))
        self.to_all(CloseOp(request.number))

    def open(self, request: Request, decodes: tuple[tuple[int, ...], ...]) -> None:
        """Let the ranks begin with the request, or the one that draws for it."""
        request.open(self._now)
        drawing, number, work = request.drawing, request.number, request.work
        owners = [rank for rank, numbers in enumerate(decodes) if number in numbers]
        counts = dict(drawing.counts) if work.draw is not None and work.draw.penalises else {}
        saved = request.keeping.saved
        fed = drawing.fed.tobytes()
        opened = OpenOp(number, work.rows, work.draw, saved, counts, request.is_session, fed)
        for rank in owners if drawing.saved and not self._all_decode else range(len(self.ops)):
            self.ops[rank].append(opened)
            if saved is not None:
                self.restores.append((rank, number))

    def decode(self, rank: int, numbers: tuple[int, ...]) -> None:
        """Order one token for each request; the other ranks take part, or forget those that draw for the first time."""
        if numbers:
            op = DecodeOp([_entry(self._requests[number], rank) for number in numbers])
            for ops in self._that_decode(rank):
                ops.append(op)
        for number in numbers:
            request = self._requests[number]
            if request.drawing.asked == 1 and not self._all_decode:
                for other, ops in enumerate(self.ops):
                    ops += [CloseOp(number)] if other != rank else []
            self._save(request, rank)

    def decode_again(self, rank: int, numbers: tuple[int, ...], rounds: int) -> None:
        """Order further rounds for the requests that may draw; a state that is to be handed out comes first."""
        if self._all_decode and rank < len(self.ops) - 1:
            return  # the last rank draws
        requests = [self._requests[number] for number in numbers]
        for _ in range(rounds):
            drawing = [request for request in requests if request.drawing.may_ask and not request.awaits_save]
            op = DecodeOp([_entry(request, rank) for request in drawing])
            for rounds_of_rank in self.rounds if self._all_decode else [self.rounds[rank]]:
                rounds_of_rank.append(op)

    def prefill(self, block: ScheduledBlock) -> None:
        """Order a block, cut over the ranks."""
        request = self._requests[block.request]
        reading = request.reading
        for ops, length in zip(self.ops, block.lengths, strict=True):
            tokens = reading.take(length)
            # The last token of a prompt is in no block, so there is always one that follows.
            following = None if request.scores is None else reading.queue.first
            ops.append(PrefillOp(block.request, block.start, list(block.lengths), tokens, following))
        reading.end_block(block.tokens)
        request.drawing.logits_are_at(max(rank for rank, length in enumerate(block.lengths) if length))
        self.save_awaited(request)

    def end_blocks(self, request: Request) -> None:
        """End a request's blocks of this step: save its state if due; let the ranks forget an encoding once read."""
        self._save(request, request.number % len(self.ops))
        if request.is_read:
            request.keeping.close()
            self.to_all(CloseOp(request.number))

    def save_awaited(self, request: Request) -> None:
        """Ask the rank that has its logits for a state that is handed out, and of a stored session for any."""
        drawing = request.drawing
        kept = request.is_session and request.keeping.on_ranks and not drawing.rewinding
        if request.awaits_save or (kept and self._states.save_is_due(request)):
            op, owner = SaveOp(request.number, request.ask_state(self._now), True), drawing.owner
            for ops in [self.ops[drawing.logits_rank or 0]] if owner is None else self._that_decode(owner):
                ops.append(op)

    def _save(self, request: Request, rank: int) -> None:
        """Ask for the state where the request has gone far since the last one that was asked for."""
        if not request.is_session and not request.is_read and self._states.save_is_due(request):
            op = SaveOp(request.number, request.ask_state(self._now))
            for ops in self._that_decode(rank) if request.drawing.owner is not None else [self.ops[rank]]:
                ops.append(op)

    def _that_decode(self, rank: int) -> list[list[Op]]:
        """The orders of the ranks that decode what `rank` draws for."""
        return self.ops if self._all_decode else [self.ops[rank]]


def _entry(request: Request, rank: int) -> DecodeEntry:
    """The next draw, with the token that goes along, as far as it is known."""
    index = request.drawing.ask(rank)
    if index < 0:
        return DecodeEntry(request.number, int.from_bytes(request.reading.take(1), "little"))
    return DecodeEntry(request.number, request.drawing.drawn(index))


@dataclass
class _UnderWay:
    k: int
    sent_at: float
    waiting: set[int]
    reached: list[tuple[int, int]]  # requests, and the position after this step
    tokens: int
    rounds: int
    prefill_s: float = float("inf")
    decode_s: float = 0.0

    def finished(self, done: StepDone) -> None:
        """Note that a rank is done. Its waits in exchanges count as reading: the rank that read least waited least."""
        self.waiting.discard(done.rank)
        self.prefill_s = min(self.prefill_s, done.seconds - done.decode_seconds)
        self.decode_s = max(self.decode_s, done.decode_seconds)


@dataclass
class StepBook:
    """The steps of one epoch, numbered from 1 without a gap."""

    ranks: int
    all_decode: bool = False  # every request, where each has some of the layers
    epoch: int = 0
    last_k: int = 0
    under_way: deque[_UnderWay] = field(default_factory=deque)
    pace: Pace = field(default_factory=Pace)
    _done: list[int] = field(default_factory=list)
    _rate: deque[tuple[float, int]] = field(default_factory=deque)

    def begin_epoch(self, epoch: int) -> None:
        """Begin a new epoch, with step 1."""
        self.epoch, self.last_k = epoch, 0
        self.under_way.clear()
        self._done = [0] * self.ranks

    @property
    def oldest(self) -> tuple[float, int] | None:
        """The time at which the oldest unfinished step was sent, and its number."""
        return (self.under_way[0].sent_at, self.under_way[0].k) if self.under_way else None

    def compose(
        self, plan: StepPlan, requests: OpenRequests, states: States, now: float
    ) -> Iterator[tuple[int, AnyMessage]]:
        """Compose the next step of every rank, after the states it begins with; takes tokens out of the requests.

        Decoding stands before prefill.
        """
        orders = _Orders(self.ranks, requests, states, now, self.all_decode)
        for number in requests.take_closed():
            orders.to_all(CloseOp(number))
        for number in plan.swaps:
            orders.put_aside(requests[number])
        for number in plan.opens:
            orders.open(requests[number], plan.decodes)
        for rank, numbers in enumerate(plan.decodes):
            orders.decode(rank, numbers)
        for block in plan.blocks:
            orders.prefill(block)
        read = list(dict.fromkeys(block.request for block in plan.blocks))
        for number in read:
            orders.end_blocks(requests[number])
        for rank, numbers in enumerate(plan.decodes):
            orders.decode_again(rank, numbers, plan.rounds)
        for request in requests:
            orders.save_awaited(request)
        self._account(plan, now)
        return self._messages(orders, requests, states, read)

    def _account(self, plan: StepPlan, now: float) -> None:
        """Count the step as under way."""
        self.last_k += 1
        reached = [(block.request, block.start + block.tokens) for block in plan.blocks]
        tokens, drawing = sum(block.tokens for block in plan.blocks), 1 + plan.rounds if any(plan.decodes) else 0
        self.under_way.append(_UnderWay(self.last_k, now, set(range(self.ranks)), reached, tokens, drawing))
        self._forget_old_rates(now)
        self._rate.append((now, tokens + sum(map(len, plan.decodes)) * (1 + plan.rounds)))

    def _messages(
        self, orders: _Orders, requests: OpenRequests, states: States, read: list[int]
    ) -> Iterator[tuple[int, AnyMessage]]:
        for rank, number in orders.restores:
            start = 0
            for part in states.parts(number):
                yield rank, StatePart(self.epoch, rank, number, start, part)
                start += len(part)
        for rank, ops in enumerate(orders.ops):
            yield rank, Step(self.epoch, self.last_k, ops, orders.rounds[rank])
        # Only now: an API process that turns out to be gone ends all of its requests, and the step may hold several.
        for number in read:
            if (request := requests.get(number)) is not None:
                requests.grant(request)

    def finish(self, done: StepDone) -> list[tuple[int, int]]:
        """Note that one rank has finished a step; returns the requests that all ranks have brought on, and how far.

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

    def any_finished(self, k: int) -> bool:
        """Return whether a rank has finished this step."""
        return k <= max(self._done)

    def check_due(self, rank: int, k: int) -> None:
        """Raises: WireError if `k` is not the step that is due from this rank."""
        due = self._done[rank] + 1
        if k != due or k > self.last_k:
            raise WireError(f"finished step {k}, due was step {due} of {self.last_k}")

    def tokens_per_second(self, now: float) -> float:
        """Tokens per second, prefilled or drawn, in the steps sent in the last RATE_WINDOW_S seconds."""
        self._forget_old_rates(now)
        return sum(tokens for _, tokens in self._rate) / RATE_WINDOW_S

    def _forget_old_rates(self, now: float) -> None:
        while self._rate and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()
