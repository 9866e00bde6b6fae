"""What the scheduler may know of an open request."""

from dataclasses import dataclass, replace

from dist_attn.control.requests import Request
from dist_attn.control.scheduler import RequestView
from dist_attn.rank_link.rows import GRAIN, row_length, sequence_length
from dist_attn.wire.messages import RowSpec

MOST_OFFERS = 2  # states that wait to be fetched; with more of them a session rests
ROW_BYTES_PER_BLOCK = 8 << 20  # so that the rows of a step stay below the size of a message


@dataclass(frozen=True)
class Cutting:
    """How texts are cut into blocks. Units: tokens of all ranks together, seconds.

    `text_tokens` is how much the model reads at once, None any length. A text that has read `stay_tokens` in its place
    may be put aside; None: never. After `patience_s` a block is cut from the tokens that have come.
    """

    chunk: int
    patience_s: float
    hidden_size: int = 0
    text_tokens: int | None = None
    stay_tokens: int | None = None


def view_of(request: Request, cutting: Cutting, now: float, blocked: bool) -> RequestView:
    """The request as the scheduler sees it; `blocked`: its reader is slow, or it is not its turn."""
    reading, keeping, drawing = request.reading, request.keeping, request.drawing
    view = RequestView(
        number=request.number,
        opened=keeping.on_ranks,
        start=reading.dispatched,
        final=reading.final,
        overdue=now - reading.waiting_since >= cutting.patience_s,
        blocked=blocked or keeping.swapping_out,
        chunk=cutting.chunk,
        available=reading.available,
        due=reading.due,
        priority=request.terms.priority,
        queued_at=keeping.queued_at,
        swappable=keeping.on_ranks
        and not request.is_session
        and not reading.prefilled
        and cutting.stay_tokens is not None
        and reading.dispatched - keeping.place_at >= cutting.stay_tokens,
    )
    ready = reading.prefilled and drawing.may_ask
    if request.is_session:
        # However slowly its text comes: it is always cut into the same blocks.
        waits = not request.is_restored or drawing.rewinding or keeping.ranks_done
        rests = waits or len(keeping.offers.waiting) > MOST_OFFERS
        owner = drawing.logits_rank if ready and drawing.owner is None else drawing.owner
        blocked = blocked or rests
        return replace(view, overdue=False, blocked=blocked, home=request.number, ready=ready, owner=owner)
    if request.work.rows is not None:
        return _cut_rows(view, request.work.rows, cutting)
    # A request ends with its last token: by then the scores of its prompt must have come from every rank.
    ready = ready and (request.scores is None or reading.prefill_done)
    # As those of sessions, states that are kept for others always come of the same blocks.
    overdue = view.overdue and not request.has_states
    return replace(view, ready=ready, owner=drawing.owner, overdue=overdue)


def _cut_rows(view: RequestView, rows: RowSpec, cutting: Cutting) -> RequestView:
    """An encoding: no block has too many rows, and none ends at a row inside a sequence."""
    length = row_length(rows)
    grid = GRAIN if cutting.text_tokens is None else sequence_length(rows, cutting.text_tokens)
    limit = (ROW_BYTES_PER_BLOCK // (4 * max(1, cutting.hidden_size))) * (length or ROW_BYTES_PER_BLOCK)
    chunk = max(1, min(view.chunk, limit) // grid) * grid
    if cutting.text_tokens is None:
        return replace(view, grid=grid, chunk=chunk, row_length=length)
    # Sequences need no other rank, so short texts go around.
    return replace(view, grid=grid, chunk=chunk, home=view.number)
