"""What the ranks do next: a pure function from a frozen view of the open work to a plan for one step.

Decoding comes first, then short prompts in order of arrival, then long documents by deficit round-robin. While anything
decodes, a step carries little prefill, and further rounds of decoding go between the layers of its blocks, as many as
leave reading half of the time: the time between tokens stays bounded, and so does what reading loses. When short and
long work wait together each gets half of the step, and one block at least: nobody starves.

A text is always cut into the same blocks: at multiples of its chunk, however much a step has room for and whatever else
waits. So its rows and its state have the same bits in a busy engine, in an idle one, and when it is read a second time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from dist_attn.control.rows import GRAIN

__all__ = ["Block", "Limits", "Plan", "SessionView", "Turn", "View", "plan", "split"]

DECODE_SHARE = 0.45
"""Of a step's time. A little under one half, since what is promised to reading is half of the machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes into one step. Units: tokens and seconds; `block_tokens` and `beside_decode_tokens` are per rank.

    `step_s` is how long a step should read at most, as far as one chunk allows: what comes meanwhile waits for it.
    `token_s` and `round_s` are what a token of prefill and a round of decoding take; 0: not known yet.
    """

    ranks: int = 1
    block_tokens: int = 2048
    beside_decode_tokens: int = 512
    short_tokens: int = 2048
    max_sessions: int = 4  # whose blocks share a step
    max_active: int = 128
    step_s: float = 0.25
    token_s: float = 0.0
    round_s: float = 0.0
    pauses: int = 0  # places in a block where a round of decoding may go


@dataclass(frozen=True, slots=True)
class SessionView:
    """One open request: tokens [start, start + available) may be prefilled now; `final`: none will follow them."""

    session: int
    opened: bool = True  # the ranks hold a state for it
    start: int = 0
    available: int = 0
    final: bool = False
    overdue: bool = False  # its tokens have waited long enough for more to come
    row_length: int | None = None  # a row ends at every multiple of it; None: only at the end of the input
    grid: int = GRAIN  # tokens; blocks and the slices of ranks are cut at multiples of it
    chunk: int = GRAIN  # tokens on all ranks; a block ends at every multiple of it
    due: tuple[int, ...] = ()  # where its next blocks ended when they were read before; they end there again
    home: int = 0  # the rank that reads what is too short to be shared
    ready: bool = False  # its prompt is prefilled: a token can be drawn
    owner: int | None = None  # the rank that keeps its state while it decodes
    blocked: bool = False  # its reader is slow: no work for now


@dataclass(frozen=True, slots=True)
class Turn:
    """A long document's place in the round and the tokens it is owed."""

    session: int
    deficit: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything the scheduler may know. `sessions` stand in order of arrival."""

    limits: Limits
    sessions: tuple[SessionView, ...]
    ring: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [start, start + sum(lengths)) of a session, `lengths[r]` of them on rank r."""

    session: int
    start: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens on all ranks together."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step: sessions to open, blocks to prefill, and the sessions that each rank draws a token for.

    They draw `rounds` times more between the layers of the blocks.
    """

    opens: tuple[int, ...]
    blocks: tuple[Block, ...]
    decodes: tuple[tuple[int, ...], ...]
    ring: tuple[Turn, ...]
    rounds: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.blocks and not any(self.decodes)


def plan(view: View) -> Plan:
    """The next step for this view; the same view always gives the same plan."""
    limits = view.limits
    sessions = _admitted(view)
    decodes = _decodes(sessions, limits.ranks)
    blocks, ring = _prefills(view, sessions, _budget(limits, decoding=any(decodes)))
    busy = {block.session for block in blocks}.union(*decodes)
    opens = tuple(s.session for s in sessions if not s.opened and s.session in busy)
    return Plan(opens, blocks, decodes, ring, _rounds(limits, blocks) if any(decodes) else 0)


def _budget(limits: Limits, *, decoding: bool) -> int:
    """Tokens of prefill in this step: few beside decoding, but enough for half of the time; else for `step_s`."""
    most = limits.ranks * limits.block_tokens
    if not limits.token_s:
        return min(most, limits.ranks * limits.beside_decode_tokens) if decoding else most
    if not decoding:
        return min(most, int(limits.step_s / limits.token_s))
    half = int(limits.round_s / limits.token_s)
    return min(most, max(limits.ranks * limits.beside_decode_tokens, half))


def _rounds(limits: Limits, blocks: tuple[Block, ...]) -> int:
    """How many rounds go between the layers, so that all of them together take `DECODE_SHARE` of the step at most."""
    if not limits.round_s or not limits.token_s:
        return 0
    reading_s = _tokens(list(blocks)) * limits.token_s
    fit = int(reading_s * DECODE_SHARE / (1 - DECODE_SHARE) / limits.round_s)
    return max(0, min(fit - 1, limits.pauses * len(blocks)))


def _admitted(view: View) -> tuple[SessionView, ...]:
    """The sessions that hold a state already, and the first of the others as far as there is room for states."""
    room = view.limits.max_active - sum(s.opened for s in view.sessions)
    chosen = []
    for session in view.sessions:
        if session.blocked:
            continue
        if not session.opened:
            if room <= 0 or not (session.ready or _next(session, session.start)):
                continue
            room -= 1
        chosen.append(session)
    return tuple(chosen)


def _decodes(sessions: tuple[SessionView, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """One token for every session that can draw one; a new one goes to the rank that draws for the fewest."""
    loads = [sum(s.owner == rank for s in sessions) for rank in range(ranks)]
    decodes: list[list[int]] = [[] for _ in range(ranks)]
    for session in sessions:
        if session.ready:
            owner = session.owner
            if owner is None:
                owner = loads.index(min(loads))
                loads[owner] += 1
            decodes[owner].append(session.session)
    return tuple(tuple(of_rank) for of_rank in decodes)


def _prefills(view: View, sessions: tuple[SessionView, ...], budget: int) -> tuple[tuple[Block, ...], tuple[Turn, ...]]:
    """At most `budget` tokens of blocks (a little more when short and long work share it), and the next round.

    It is a chunk at least: what fits into no step would never be read.
    """
    limits = view.limits
    chunk = max([GRAIN, *(s.chunk for s in sessions)])
    budget = max(chunk, budget)
    runnable = {s.session: s for s in sessions if _next(s, s.start)}
    shorts = [s for s in runnable.values() if s.final and s.available <= limits.short_tokens]
    longs = runnable.keys() - {s.session for s in shorts}
    share = max(chunk, budget // 2) if shorts and longs else budget

    blocks: list[Block] = []
    left, served = share, 0
    for session in shorts:
        made = _blocks(session, left, limits.ranks)
        if not made or served == limits.max_sessions - bool(longs):
            break
        blocks += made
        served += 1
        left -= _tokens(made)

    left = share if longs else 0
    waiting: list[Turn] = []
    done: list[Turn] = []
    for turn in _round(view.ring, longs):
        owed = min(turn.deficit + share, 2 * share)
        made = _blocks(runnable[turn.session], min(owed, left), limits.ranks) if served < limits.max_sessions else []
        if not made:
            waiting.append(turn)
            continue
        blocks += made
        served += 1
        done.append(Turn(turn.session, owed - _tokens(made)))
        left -= _tokens(made)
    return tuple(blocks), tuple(waiting + done)


def _round(ring: tuple[Turn, ...], longs: set[int]) -> Iterator[Turn]:
    """The long documents in their order; new ones at the end, those that have nothing to do leave it."""
    known = {turn.session for turn in ring}
    yield from (turn for turn in ring if turn.session in longs)
    yield from (Turn(session, 0) for session in sorted(longs - known))


def _blocks(session: SessionView, limit: int, ranks: int) -> list[Block]:
    """The next blocks of the session, `limit` tokens at most together; none while it is better to wait."""
    blocks: list[Block] = []
    at = session.start
    while (stop := _next(session, at)) and stop - session.start <= limit:
        blocks.append(Block(session.session, at, split(at, stop - at, ranks, session.grid, session.home % ranks)))
        at = stop
    return blocks


def _tokens(blocks: list[Block]) -> int:
    return sum(block.tokens for block in blocks)


def _next(session: SessionView, at: int) -> int:
    """Where a block that begins at `at` ends; 0 while it is better to wait.

    A block ends at the end of the input or of a chunk. Only a client that sends slowly gets a cut on the grid before,
    or at the last row edge where rows are shorter: they should not wait for tokens that come much later.
    """
    stop = session.start + session.available
    if at >= stop:
        return 0
    if at < (session.due[-1] if session.due else 0):
        return min(edge for edge in session.due if edge > at)
    edge = (at // session.chunk + 1) * session.chunk
    if edge <= stop:
        return edge
    if session.final:
        return stop
    if not session.overdue:
        return 0
    on_grid = stop - stop % session.grid
    on_row = stop - stop % session.row_length if session.row_length else 0
    return next((cut for cut in (on_grid, on_row) if cut > at), 0)


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
