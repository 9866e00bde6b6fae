"""Answers of the ranks: rows and tokens go to the API, losses send requests back, and complete requests end."""

from typing import final

import structlog

from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.settings import ControlSettings
from dist_attn.control.states import States
from dist_attn.wire.messages import Generated, Progress
from dist_attn.wire.rank_messages import Drawn, RequestFault, RowPieces
from dist_attn_api.errors import Code

log = structlog.get_logger("dist_attn.control")


@final
class Answers:
    """The part of the controller that turns the ranks' answers into messages to API processes."""

    def __init__(self, requests: OpenRequests, states: States, settings: ControlSettings) -> None:
        self._requests = requests
        self._states = states
        self._losses_to_fail = settings.losses_to_fail
        self._furthered = False

    # ---- from the ranks ------------------------------------------------------------------------

    def progress(self, number: int, position: int) -> None:
        """Note that all ranks have read a request up to `position`."""
        request = self._requests.get(number)
        if request is None:
            return
        request.reading.reached(position)
        self._furthered |= request.losses.progress(position, 0)
        self._states.commit(request)
        if request.terms.progress:
            self._requests.post(request.peer, Progress(request.request_id, position))
        if self._requests.get(number) is not None:
            self.settle(request)

    def take_pieces(self, pieces: RowPieces) -> None:
        """Add row pieces of a step to their request and send the rows that are complete.

        Raises: WireError if they do not fit.
        """
        request, model = self._requests.get(pieces.request), self._requests.model
        form = None if request is None or model is None else request.row_form(model.hidden_size)
        if request is None or form is None:
            return
        self._requests.post_rows(request, request.reading.add_rows(pieces, form))
        self.settle(request)

    def take_draw(self, drawn: Drawn) -> None:
        """Send a drawn token on; an end token and `max_tokens` end the request."""
        request, model = self._requests.get(drawn.request), self._requests.model
        if request is None or request.work.draw is None or model is None:
            return
        drawing = request.drawing
        again = drawing.take_back()
        self._furthered |= request.losses.progress(request.reading.received, drawing.back)
        ends = drawn.token in request.work.draw.ended_by(model.end_tokens)
        if again:
            self._compare(request, drawn.token)
        elif not drawing.complete:
            self._send(request, drawn, ends)
        elif ends:
            drawing.end()
        self._states.rewind_if_due(request)

    def _send(self, request: Request, drawn: Drawn, ends: bool) -> None:
        logprobs = drawn.logprobs
        reason: str | None = "stop"
        if ends:
            request.drawing.end()
            logprobs = None if request.scores is None else logprobs
        else:
            reason = request.drawing.send(drawn.token)
        tokens, told = ([] if ends else [drawn.token]), (None if logprobs is None else [logprobs])
        end_token = drawn.token if ends and told is not None else None
        self._requests.post(request.peer, Generated(request.request_id, tokens, reason, told, end_token))
        if reason is not None:
            self._states.end_drawing(request)

    def _compare(self, request: Request, token: int) -> None:
        """Compare a token that is drawn again with the one that was sent, which is fed on; log a difference."""
        draw = request.drawing.back
        sent = request.drawing.drawn(draw - 1)
        if token != sent:
            log.error("replay differs", request=request.request_id, draw=draw, sent=sent, again=token)

    def take_fault(self, fault: RequestFault) -> None:
        """End a request with which the ranks cannot go on."""
        request = self._requests.get(fault.request)
        if request is not None:
            self._requests.fail(request, fault.code, fault.error)

    def came_further(self) -> bool:
        """Return whether any request has come further than ever since the last call."""
        further, self._furthered = self._furthered, False
        return further

    # ---- losses --------------------------------------------------------------------------------

    def rewind(self, reason: str) -> int:
        """Send the requests of the lost ranks back to their last saved states; returns how many tokens to do again.

        A request that `losses_to_fail` groups in a row were lost on, and that came no further, fails: it may be the
        cause.
        """
        self._furthered = False  # what the lost ranks did says nothing of the next ones
        again = 0
        for request in [request for request in self._requests if request.losses.touched_this_epoch]:
            request.count_loss()
            if request.losses.count >= self._losses_to_fail:
                text = f"the ranks were lost {request.losses.count} times while they worked on this request ({reason})"
                self._requests.fail(request, Code.ENGINE_FAILED, text)
            else:
                again += request.rewind()
        self._states.ranks_lost()
        self._requests.take_closed()  # the next ranks hold nothing
        return again

    # ---- the end -------------------------------------------------------------------------------

    def settle(self, request: Request) -> None:
        """End a request with nothing left to do: an encoding with every row sent, a completion of no tokens with its
        prompt read, or a session that stands at its end.
        """
        if request.is_session:
            self._states.settle(request)
            return
        undrawn = request.work.draw is not None and not request.work.draw.max_tokens
        if undrawn and request.reading.prefill_done and not request.keeping.ranks_done:
            self._requests.post(request.peer, Generated(request.request_id, [], "length"))
            self._states.end_drawing(request)
            return
        if request.work.rows is None or not request.reading.final:
            return
        self._requests.post_rows(request, request.reading.last_rows())
        if request.reading.rows_complete:
            self._requests.end(request)
