"""Whether a request is taken: what the loaded model cannot do, and what there is no room for."""

import math
from collections.abc import Iterable

from dist_attn.control.pace import Pace
from dist_attn.control.requests import Request
from dist_attn.wire.messages import OpenWork, RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import RankHello
from dist_attn.wire.row_choice import MODEL_POOLING

LEAST_WAIT_S, MOST_WAIT_S = 1, 120  # clients do not come back by themselves after longer waits


def contradiction_in(work: OpenWork) -> str:
    """Why no engine does this work, empty when one does: only a session reads, draws and keeps states at once."""
    if work.kind == "session":
        return "states of a prompt are kept of completions only" if work.keep.at else ""
    if (work.rows is None) == (work.draw is None):
        return "needed is either the rows of an encoding or how the tokens of a completion are drawn"
    if work.keep.every:
        return "states at multiples of a number of tokens are kept of sessions only"
    if work.rows is not None and (work.begin is not None or work.keep.at):
        return "an encoding that is no session begins with no stored state and keeps none"
    return ""


def misfit(model: RankHello, rows: RowSpec | None, sampling: SamplingSpec | None, received: int) -> str:
    """Why the model cannot do this work, of which `received` tokens have come; empty when it can."""
    unknown = [] if sampling is None else [token for token in sampling.logit_bias if token >= model.vocab_size]
    if unknown:
        return f"logit_bias names token {unknown[0]}; the vocabulary has {model.vocab_size} tokens"
    longest = model.text_tokens
    if longest is None:
        asks = rows is not None and rows.pooling == MODEL_POOLING
        return "this model has no pooling of its own; pool by mean or last" if asks else ""
    if sampling is not None or rows is None:
        return "this model makes vectors of texts and cannot write any"
    if rows.granularity != "token" and rows.pooling != MODEL_POOLING:
        return f"this model pools in a way of its own; pooling must be {MODEL_POOLING!r}"
    if rows.granularity == "window" and rows.window > longest:
        return f"a window of {rows.window} tokens is over the {longest} that this model reads at once"
    if rows.granularity == "document" and received > longest:
        return f"a text of {received} tokens or more is over the {longest} that this model reads at once"
    return ""


def refusal(
    new: Request, others: Iterable[Request], *, max_open: int, max_waiting_tokens: int, pace: Pace
) -> tuple[str, int] | None:
    """Why there is no room for one more request, and in how many seconds there may be; None when there is.

    What counts is work of its own class and of those before it: what is less urgent does not keep it waiting. One
    that is alone is always taken.
    """
    known = list(others)
    if len(known) >= max_open:
        text = f"{len(known)} requests are open, which is the limit of this engine; try again soon"
        return text, _wait(min(r.remaining for r in known), pace)
    ahead = sum(r.remaining for r in known if r.terms.priority <= new.terms.priority)
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
