"""The plan of one step: a pure function from a frozen view of the open work to what the ranks do next.

Everything is shared by caller first, and within a caller by request. Decoding comes first, then short prompts in order
of arrival, then long documents in turns, by what each has had. While anything decodes, a step carries little prefill,
and further rounds of decoding go between the layers of its blocks, as many as leave reading half of the time: the time
between tokens stays bounded, and so does what reading loses. When short and long work wait together each gets half of
the step, and one block at least: no request starves. More urgent classes come first among short prompts, and have four
times the share of the next class among documents.

A caller that is alone draws for all of its requests in every step. Beside others' work a step draws for one batch of
slots, which are dealt to the callers: a token of one does not wait for those of every request of another.

A text is always cut into the same blocks: at multiples of its chunk and at its end, however much a step has room for,
whatever else waits, and however slowly it comes. So its rows and its state have the same bits in a busy engine, in an
idle one, and when it is sent or read a second time.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from dist_attn.model_config.figures import GRAIN, SLOTS

WEIGHTS = (1, 4, 16)
"""The weight of a token in each class, the most urgent first."""
STEP_ROW_BYTES = 32 << 20  # so that a rank's answer stays below the size of a message
DECODE_SHARE = 0.38
"""Decoding's share of a step's time. Under one half: half is promised to reading, and handing tokens on takes some."""
DRAWS_IN_A_TURN = 4
"""Draws in the turn of a request that shares slots: each change of a batch's requests costs about as much as a draw."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one step. Units: tokens and seconds; `block_tokens` and `beside_decode_tokens` are per rank.

    `step_s` is how long a step should read at most, as far as one chunk allows: what comes meanwhile waits for it.
    `token_s` and `round_s` are what a token of prefill and a round of decoding take; 0: not known yet.
    """

    ranks: int = 1
    block_tokens: int = 2048
    beside_decode_tokens: int = 512
    short_tokens: int = 2048
    max_requests: int = 4  # whose blocks share a step
    max_active: int = 128
    state_bytes: int = 0  # of states in a rank at once; 0: as many as there are places
    step_s: float = 0.25
    token_s: float = 0.0
    round_s: float = 0.0
    pauses: int = 0  # places in a block where a round of decoding may go
    weights_over_ranks: bool = False  # the last rank draws for all, and all take part


@dataclass(frozen=True, slots=True)
class RequestView:
    """One open request: tokens [start, start + available) may be prefilled now; `final`: none will follow them."""

    number: int
    opened: bool = True  # the ranks hold a state for it
    start: int = 0
    available: int = 0
    final: bool = False
    row_bytes: int = 0  # of the rows that ranks make of a token, at most
    grid: int = GRAIN  # tokens; blocks and the slices of ranks are cut at multiples of it
    chunk: int = GRAIN  # tokens on all ranks; a block ends at every multiple of it
    home: int = 0  # the rank that reads what is too short to be shared
    ready: bool = False  # its prompt is prefilled: a token can be drawn
    owner: int | None = None  # the rank that keeps its state while it decodes
    blocked: bool = False  # its reader is slow: no work for now
    priority: int = 1  # 0 is the most urgent class, 2 the least
    queued_at: float = 0.0  # since when it waits for a place among the states
    swappable: bool = False  # its state may be put aside for one that is in more of a hurry
    state_bytes: int = 0  # that its state will take in a rank, as far as is known
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """The share of a request so far: a long document's tokens, each counted by the weight of its class, or the draws of
    its present turn among the requests that draw.
    """

    number: int
    passed: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns taken so far: by long documents, by callers, in tokens read for them, and by requests that draw."""

    documents: tuple[Turn, ...] = ()
    callers: tuple[tuple[str, int], ...] = ()
    line: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """All that the scheduler may know. `requests` stand in order of arrival."""

    limits: Limits
    requests: tuple[RequestView, ...]
    turns: Turns = Turns()


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """Tokens [start, start + sum(lengths)) of a request, `lengths[r]` of them on rank r."""

    request: int
    start: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens on all ranks together."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: requests to open, blocks to prefill, and the requests that each rank draws a token for.

    They draw `rounds` times more between the layers of the blocks. The states of `swaps` are put aside before anything
    is opened.
    """

    opens: tuple[int, ...]
    blocks: tuple[ScheduledBlock, ...]
    decodes: tuple[tuple[int, ...], ...]
    turns: Turns
    rounds: int = 0
    swaps: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.blocks and not any(self.decodes) and not self.swaps


def plan(view: SchedulerView) -> StepPlan:
    """The next step for this view; the same view always gives the same plan."""
    limits = view.limits
    requests, swaps = admitted(view, lambda request: request.ready or bool(_next(request, request.start)))
    line = _line(view.turns.line, requests)
    decodes = _decodes(requests, limits, line)
    blocks, documents, callers = _prefills(view, requests, _budget(limits, decoding=any(decodes)))
    busy = {block.request for block in blocks}.union(*decodes)
    opens = tuple(r.number for r in requests if not r.opened and r.number in busy)
    rounds = _rounds(limits, blocks) if any(decodes) else 0
    turns = Turns(documents, callers, _moved_on(line, set().union(*decodes), 1 + rounds))
    return StepPlan(opens, blocks, decodes, turns, rounds, swaps)


def _budget(limits: Limits, *, decoding: bool) -> int:
    """The tokens of prefill in this step: few beside decoding, but enough for half of the time; else for `step_s`."""
    most = limits.ranks * limits.block_tokens
    if not limits.token_s:
        return min(most, limits.ranks * limits.beside_decode_tokens) if decoding else most
    if not decoding:
        return min(most, int(limits.step_s / limits.token_s))
    half = int(limits.round_s / limits.token_s)
    return min(most, max(limits.ranks * limits.beside_decode_tokens, half))


def _rounds(limits: Limits, blocks: tuple[ScheduledBlock, ...]) -> int:
    """The rounds of decoding between the layers, which together take `DECODE_SHARE` of the step at most."""
    if not limits.round_s or not limits.token_s:
        return 0
    reading_s = _tokens(list(blocks)) * limits.token_s
    fit = int(reading_s * DECODE_SHARE / (1 - DECODE_SHARE) / limits.round_s)
    return max(0, min(fit - 1, limits.pauses * len(blocks)))


def _decodes(requests: tuple[RequestView, ...], limits: Limits, line: tuple[Turn, ...]) -> tuple[tuple[int, ...], ...]:
    """Plan one token for every request that can draw one, or where callers share slots for those whose turn it is; a
    new one goes to the rank that draws for the fewest.
    """
    ranks = limits.ranks
    of_ranks: list[list[RequestView]] = [[] for _ in range(ranks)]
    loads = [sum(r.owner == rank for r in requests) for rank in range(ranks)]
    for request in requests:
        if request.ready:
            owner = ranks - 1 if limits.weights_over_ranks else request.owner
            if owner is None:
                owner = loads.index(min(loads))
                loads[owner] += 1
            of_ranks[owner].append(request)
    if len({r.caller for r in requests if r.ready or _next(r, r.start)}) > 1:
        most = max(len({r.caller for r in of_rank}) for of_rank in of_ranks)
        places = {turn.number: place for place, turn in enumerate(line)}
        of_ranks = [_dealt(of_rank, SLOTS * -(-most // SLOTS), places) for of_rank in of_ranks]
    return tuple(tuple(request.number for request in of_rank) for of_rank in of_ranks)


def _dealt(ready: list[RequestView], slots: int, places: Mapping[int, int]) -> list[RequestView]:
    """Choose the requests that draw in `slots` slots: of each caller the first in line, then the second, and so on."""
    if len(ready) <= slots:
        return ready
    waiting: dict[str, deque[RequestView]] = {}
    for request in sorted(ready, key=lambda request: places[request.number]):
        waiting.setdefault(request.caller, deque()).append(request)
    chosen: set[int] = set()
    while len(chosen) < slots:
        for queue in list(waiting.values())[: slots - len(chosen)]:
            chosen.add(queue.popleft().number)
        waiting = {caller: queue for caller, queue in waiting.items() if queue}
    return [request for request in ready if request.number in chosen]


def _line(before: tuple[Turn, ...], requests: tuple[RequestView, ...]) -> tuple[Turn, ...]:
    """The line of the requests that can draw, new ones last."""
    ready = {request.number for request in requests if request.ready}
    known = tuple(turn for turn in before if turn.number in ready)
    new = ready - {turn.number for turn in known}
    return known + tuple(Turn(number, 0) for number in sorted(new))


def _moved_on(line: tuple[Turn, ...], drawn: set[int], draws: int) -> tuple[Turn, ...]:
    """The line after a step in which some have drawn `draws` times: a request that has had its turn goes to the end."""
    counted = [Turn(turn.number, turn.passed + draws * (turn.number in drawn)) for turn in line]
    ended = [Turn(turn.number, 0) for turn in counted if turn.passed >= DRAWS_IN_A_TURN]
    return (*(turn for turn in counted if turn.passed < DRAWS_IN_A_TURN), *ended)


def _prefills(
    view: SchedulerView, requests: tuple[RequestView, ...], budget: int
) -> tuple[tuple[ScheduledBlock, ...], tuple[Turn, ...], tuple[tuple[str, int], ...]]:
    """At most `budget` tokens of blocks (a little more when short and long work share it), and the next turns.

    `budget` and `STEP_ROW_BYTES` are raised to what one chunk takes: a chunk that fits no step would never be read.
    """
    limits = view.limits
    chunk, chunk_rows = max([GRAIN, *(r.chunk for r in requests)]), max([0, *(r.chunk * r.row_bytes for r in requests)])
    runnable = {r.number: r for r in requests if _next(r, r.start)}
    shorts = [r for r in runnable.values() if r.final and r.available <= limits.short_tokens]
    shorts.sort(key=lambda request: request.priority)
    longs = runnable.keys() - {r.number for r in shorts}
    read = _begun(dict(view.turns.callers), {r.caller for r in runnable.values()})
    parts = 2 if shorts and longs else 1
    share = max(chunk, budget // parts), max(chunk_rows, STEP_ROW_BYTES // parts)

    blocks: list[ScheduledBlock] = []
    room, served = _Room(*share), 0
    for request in _by_callers(shorts, lambda r: (r.priority, read[r.caller])):
        made = room.take(request, limits.ranks)
        if not made or served == limits.max_requests - bool(longs):
            break
        blocks += made
        served += 1
        read[request.caller] += _tokens(made) * WEIGHTS[request.priority]

    room = _Room(*share)
    passed = _begun({turn.number: turn.passed for turn in view.turns.documents}, longs)
    in_turn = sorted((runnable[number] for number in longs), key=lambda r: (passed[r.number], r.number))
    for request in _by_callers(in_turn, lambda r: (0, read[r.caller])):
        made = room.take(request, limits.ranks) if served < limits.max_requests else []
        if made:
            blocks += made
            served += 1
            cost = _tokens(made) * WEIGHTS[request.priority]
            passed[request.number] += cost
            read[request.caller] += cost
    return tuple(blocks), tuple(Turn(*each) for each in passed.items()), tuple(read.items())


Key = TypeVar("Key", int, str)


def _begun(before: Mapping[Key, int], now: Iterable[Key]) -> dict[Key, int]:
    """The tokens that each present key has had; a new one begins with the least of the others, and is owed nothing."""
    here = sorted(now)
    least = min((before[key] for key in here if key in before), default=0)
    return {key: before.get(key, least) for key in here}


def _by_callers(
    requests: Iterable[RequestView], comes: Callable[[RequestView], tuple[float, ...]]
) -> Iterator[RequestView]:
    """Order the requests: next is, of the first ones of each caller and class, the one that `comes` first by then."""
    waiting: dict[tuple[int, str], deque[RequestView]] = {}
    for request in requests:
        waiting.setdefault((request.priority, request.caller), deque()).append(request)
    while waiting:
        key = min(waiting, key=lambda key: comes(waiting[key][0]))
        yield waiting[key].popleft()
        if not waiting[key]:
            del waiting[key]


@dataclass
class _Room:
    """The room left in a step: tokens, and bytes of the rows that ranks make of them."""

    tokens: int
    row_bytes: int

    def take(self, request: RequestView, ranks: int) -> list[ScheduledBlock]:
        """The next blocks of the request for which there is room."""
        limit = min(self.tokens, self.row_bytes // request.row_bytes) if request.row_bytes else self.tokens
        made = _blocks(request, limit, ranks)
        self.tokens -= _tokens(made)
        self.row_bytes -= _tokens(made) * request.row_bytes
        return made


def _blocks(request: RequestView, limit: int, ranks: int) -> list[ScheduledBlock]:
    """The next blocks of the request, `limit` tokens at most together; none while it is better to wait."""
    blocks: list[ScheduledBlock] = []
    at = request.start
    while (stop := _next(request, at)) and stop - request.start <= limit:
        blocks.append(
            ScheduledBlock(request.number, at, split(at, stop - at, ranks, request.grid, request.home % ranks))
        )
        at = stop
    return blocks


def _tokens(blocks: list[ScheduledBlock]) -> int:
    return sum(block.tokens for block in blocks)


def _next(request: RequestView, at: int) -> int:
    """The end of a block that begins at `at`: a chunk's end or the input's; 0 while that has not come."""
    stop = request.start + request.available
    edge = (at // request.chunk + 1) * request.chunk
    if edge <= stop:
        return edge
    return stop if request.final and at < stop else 0


def split(start: int, count: int, ranks: int, grid: int = GRAIN, home: int = 0) -> tuple[int, ...]:
    """Cut [start, start + count) over the ranks on the absolute grid, as evenly as that allows.

    Every rank that takes part gets a grain of tokens or more, so few tokens go to few ranks, and very few to rank
    `home`; the others get 0.
    """
    for parts in range(min(ranks, count // grid), 1, -1):
        inner = [round((start + count * part / parts) / grid) * grid for part in range(1, parts)]
        cuts = [start, *inner, start + count]
        lengths = [after - before for before, after in pairwise(cuts)]
        if min(lengths) >= grid:
            return (*lengths, *[0] * (ranks - parts))
    return tuple(count if rank == home else 0 for rank in range(ranks))


def admitted(
    view: SchedulerView, has_work: Callable[[RequestView], bool]
) -> tuple[tuple[RequestView, ...], tuple[int, ...]]:
    """The requests that are worked on, in order of arrival, and those whose state is put aside for them.

    Room, in places and in bytes, goes to the most urgent class, in it to the caller that has the fewest places, and of
    its requests to the one that has waited longest. When there is none, a text that is being read and has come some way
    gives its place to a short prompt of its class, to a caller that has two places less, or to any request of a more
    urgent class; it waits then like one that has just come. One that is alone always has room.
    """
    here = [r for r in view.requests if r.opened]
    waiting = [r for r in view.requests if not r.opened and not r.blocked and has_work(r)]
    waiting.sort(key=lambda request: request.queued_at)
    places, several = Counter(r.caller for r in here), len({r.caller for r in view.requests}) > 1
    # The least urgent first; of these the one that came last.
    victims = sorted((r for r in reversed(here) if r.swappable), key=lambda r: -r.priority)
    held = {r.number: r.state_bytes for r in here}
    chosen: list[RequestView] = []
    swaps: list[int] = []
    for request in _by_callers(waiting, lambda r: (r.priority, places[r.caller], r.queued_at)):
        has_most = several and places[request.caller] >= _most_places(view.limits)
        leaving = _giving_way(request, has_most, victims, places, held, view.limits)
        if leaving is None and has_most:
            continue
        if leaving is None:
            break
        for victim in leaving:
            victims.remove(victim)
            swaps.append(victim.number)
            places[victim.caller] -= 1
            del held[victim.number]
        chosen.append(request)
        places[request.caller] += 1
        held[request.number] = request.state_bytes
    staying = [r for r in here if r.number in held]
    working = {r.number for r in chosen} | _growing(staying, view.limits.state_bytes)
    return tuple(r for r in view.requests if r.number in working), tuple(swaps)


def _giving_way(
    request: RequestView,
    has_most: bool,
    victims: Iterable[RequestView],
    places: Mapping[str, int],
    held: Mapping[int, int],
    limits: Limits,
) -> list[RequestView] | None:
    """The victims after which there is room for a request; None where there would be none. `has_most`: its caller has
    all the places it may have, so that one of its own goes first.
    """
    leaving: list[RequestView] = []
    left, counts = dict(held), dict(places)
    while has_most or not _has_room(request, left, limits):
        others = (v for v in victims if v.number in left and (not has_most or v.caller == request.caller))
        victim = next((v for v in others if _goes_before(request, v, counts, limits.short_tokens)), None)
        if victim is None:
            return None
        has_most = False
        leaving.append(victim)
        counts[victim.caller] -= 1
        del left[victim.number]
    return leaving


def _most_places(limits: Limits) -> int:
    """The most places of one caller beside others: a batch of slots stays free, as who draws keeps the place."""
    return limits.max_active - SLOTS if limits.max_active >= 2 * SLOTS else limits.max_active


def _has_room(request: RequestView, held: Mapping[int, int], limits: Limits) -> bool:
    fits = not limits.state_bytes or sum(held.values()) + request.state_bytes <= limits.state_bytes
    return len(held) < limits.max_active and (fits or not held)


def _growing(here: list[RequestView], limit: int) -> set[int]:
    """The requests that hold a state and go on, in order of arrival, as far as their states will fit.

    Texts that did not say how long they are may turn out not to fit together: the later ones rest until others end.
    """
    taken = sum(r.state_bytes for r in here if r.blocked)
    going: set[int] = set()
    for request in here:
        if request.blocked:
            continue
        taken += request.state_bytes
        if limit and going and taken > limit:
            break
        going.add(request.number)
    return going


def _goes_before(request: RequestView, other: RequestView, places: Mapping[str, int], short_tokens: int) -> bool:
    short = request.ready or (request.final and request.available <= short_tokens)
    has_fewer = places.get(request.caller, 0) + 2 <= places.get(other.caller, 0)
    return request.priority < other.priority or ((short or has_fewer) and request.priority == other.priority)
