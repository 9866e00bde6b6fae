"""How much work is open, and what is told to a request for which there is no room."""

import math
from collections.abc import Iterable

from dist_attn.control.pace import Pace
from dist_attn.control.sessions import Session

__all__ = ["refusal"]

LEAST_WAIT_S, MOST_WAIT_S = 1, 120  # clients do not come back by themselves after longer waits


def refusal(
    new: Session, others: Iterable[Session], *, max_open: int, max_waiting_tokens: int, pace: Pace
) -> tuple[str, int] | None:
    """Why there is no room for one more request, and in how many seconds there may be; None when there is.

    What counts is work of its own class and of those before it: what is less urgent does not keep it waiting. One
    that is alone is always taken.
    """
    known = list(others)
    if len(known) >= max_open:
        text = f"{len(known)} requests are open, which is the limit of this engine; try again soon"
        return text, _wait(min(session.remaining for session in known), pace)
    ahead = sum(session.remaining for session in known if session.terms.priority <= new.terms.priority)
    surplus = ahead + new.remaining - max_waiting_tokens
    if ahead and surplus > 0:
        text = (
            f"{ahead} tokens are still to be read or drawn, and this request adds {new.remaining}; the limit of this "
            f"engine is {max_waiting_tokens}; try again later"
        )
        return text, _wait(surplus, pace)
    return None


def _wait(tokens: int, pace: Pace) -> int:
    """How long so many tokens take; the least where the ranks' speed is not known yet. Units: seconds."""
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(tokens * pace.token_s)))
