"""Who holds a state on the ranks: there is room for so many, and a long text gives its place up to a short one."""

from collections.abc import Callable

from dist_attn.control.views import SessionView, View

__all__ = ["admitted"]


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
