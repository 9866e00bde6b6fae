"""What the ranks do next: a pure function from a frozen view of the open work to a plan for one step.

Decoding comes first, then short prompts in order of arrival, then long documents in turns, by what each has had. While
anything decodes, a step carries little prefill, and further rounds of decoding go between the layers of its blocks, as
many as leave reading half of the time: the time between tokens stays bounded, and so does what reading loses. When
short and long work wait together each gets half of the step, and one block at least: nobody starves. More urgent
classes come first among short prompts, and have four times the share of the next class among documents.

A text is always cut into the same blocks: at multiples of its chunk, however much a step has room for and whatever else
waits. So its rows and its state have the same bits in a busy engine, in an idle one, and when it is read a second time.
"""

from collections.abc import Callable
from itertools import pairwise

from dist_attn.control.views import Block, Limits, Plan, SessionView, Turn, View
from dist_attn.rank_link.rows import GRAIN

__all__ = ["Block", "Limits", "Plan", "SessionView", "Turn", "View", "admitted", "plan", "split"]

WEIGHTS = (1, 4, 16)
"""What a token counts for in each class, the most urgent first."""
DECODE_SHARE = 0.38
"""Of a step's time. Under one half: half of the machine is promised to reading, and handing tokens on takes some."""


def plan(view: View) -> Plan:
    """The next step for this view; the same view always gives the same plan."""
    limits = view.limits
    sessions, swaps = admitted(view, lambda session: session.ready or bool(_next(session, session.start)))
    decodes = _decodes(sessions, limits.ranks)
    blocks, ring = _prefills(view, sessions, _budget(limits, decoding=any(decodes)))
    busy = {block.session for block in blocks}.union(*decodes)
    opens = tuple(s.session for s in sessions if not s.opened and s.session in busy)
    return Plan(opens, blocks, decodes, ring, _rounds(limits, blocks) if any(decodes) else 0, swaps)


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
    shorts.sort(key=lambda session: session.priority)
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
    turns = _round(view.ring, longs)
    for place, turn in enumerate(turns):
        session = runnable[turn.session]
        made = _blocks(session, left, limits.ranks) if served < limits.max_sessions else []
        if made:
            blocks += made
            served += 1
            left -= _tokens(made)
            turns[place] = Turn(turn.session, turn.passed + _tokens(made) * WEIGHTS[session.priority])
    return tuple(blocks), tuple(turns)


def _round(ring: tuple[Turn, ...], longs: set[int]) -> list[Turn]:
    """The long documents, who has had least first; a new one begins with as much as that one, and is owed nothing."""
    known = {turn.session: turn.passed for turn in ring if turn.session in longs}
    least = min(known.values(), default=0)
    return sorted((Turn(s, known.get(s, least)) for s in longs), key=lambda turn: (turn.passed, turn.session))


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


def admitted(view: View, has_work: Callable[[SessionView], bool]) -> tuple[tuple[SessionView, ...], tuple[int, ...]]:
    """The sessions that are worked on, in order of arrival, and those whose state is put aside for them.

    Room goes to the most urgent class, in it to who has waited longest. When there is none, a text that is being read
    and has come some way gives its place to a short prompt of its class or to anybody of a more urgent one; it waits
    then like one that has just come.
    """
    here = [s for s in view.sessions if s.opened]
    waiting = [s for s in view.sessions if not s.opened and not s.blocked and has_work(s)]
    waiting.sort(key=lambda session: (session.priority, session.queued_at))
    room = max(0, view.limits.max_active - len(here))
    chosen, left = waiting[:room], waiting[room:]
    # The least urgent first; of these the one that came last.
    victims = sorted((s for s in reversed(here) if s.swappable), key=lambda s: -s.priority)
    swaps: list[int] = []
    for session in left:
        if not victims or not _goes_before(session, victims[0], view.limits.short_tokens):
            break
        swaps.append(victims.pop(0).session)
        chosen.append(session)
    working = {s.session for s in chosen} | ({s.session for s in here if not s.blocked} - set(swaps))
    return tuple(s for s in view.sessions if s.session in working), tuple(swaps)


def _goes_before(session: SessionView, other: SessionView, short_tokens: int) -> bool:
    short = session.ready or (session.final and session.available <= short_tokens)
    return session.priority < other.priority or (short and session.priority == other.priority)
