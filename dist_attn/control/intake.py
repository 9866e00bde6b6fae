"""Messages of API processes: requests are admitted or refused, their tokens checked, and stalled ones ended."""

import math
from collections.abc import Iterable
from typing import final

import structlog

from dist_attn.control.answers import Answers
from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.settings import ControlSettings
from dist_attn.control.states import States
from dist_attn.control.steps import Pace
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Failed,
    FinishDrawing,
    OpenWork,
    Tokens,
)
from dist_attn.wire.rank_messages import LoadedModel
from dist_attn.wire.specs import LONGEST_TEXT, MODEL_POOLING
from dist_attn_api.errors import Code

API_PROBE_S = 2.0
LEAST_WAIT_S, MOST_WAIT_S = 1, 120  # clients do not come back by themselves after longer waits

log = structlog.get_logger("dist_attn.control")


@final
class Intake:
    """The receiver of API processes' messages. `pace` tells when there may be room for a request that is refused."""

    def __init__(
        self, requests: OpenRequests, states: States, answers: Answers, settings: ControlSettings, pace: Pace
    ) -> None:
        self._requests = requests
        self._states = states
        self._answers = answers
        self._settings = settings
        self._pace = pace
        self._probed_at = 0.0
        self._stopping = ""

    def receive(self, peer: bytes, message: AnyMessage) -> None:
        """Take one message of an API process."""
        match message:
            case OpenWork():
                self._open(peer, message)
            case Tokens():
                self._take_tokens(peer, message)
            case FinishDrawing(drawn=drawn):
                request = self._requests.find(peer, message.request_id)
                if request is not None:
                    self._states.finish_drawing(request, drawn)
            case Cancel(request_id=request_id):
                request = self._requests.find(peer, request_id)
                if request is not None:
                    self._requests.remove(request, "cancelled")
            case _:
                log.warning("unexpected message", peer=peer.hex(), kind=type(message).__name__)

    def _open(self, peer: bytes, work: OpenWork) -> None:
        request_id = work.request_id
        if self._requests.find(peer, request_id) is not None:
            log.warning("request id is open already", request=request_id, peer=peer.hex())
            return
        if self._stopping:
            self._requests.post(peer, Failed(request_id, Code.ENGINE_NOT_READY, self._stopping))
            return
        if contradiction := contradiction_in(work):
            self._requests.post(peer, Failed(request_id, Code.INVALID_VALUE, contradiction))
            return
        request = self._requests.make(peer, work)
        limits = {"max_open": self._settings.max_open, "max_waiting_tokens": self._settings.max_waiting_tokens}
        refused = refusal(request, self._requests, **limits, pace=self._pace)
        if refused is not None:
            self._requests.post(peer, Failed(request_id, Code.OVERLOADED, *refused))
            return
        self._requests.add(request)
        self._requests.post(peer, Accepted(request_id))
        if self._states.expect(request):
            self._requests.grant(request)

    def refuse(self, peer: bytes, request_id: str, text: str) -> None:
        """End a request of which something unreadable came; it may not be open yet."""
        request = self._requests.find(peer, request_id)
        if request is not None:
            self._requests.fail(request, Code.INVALID_VALUE, text)
        else:
            self._requests.post(peer, Failed(request_id, Code.INVALID_VALUE, text))

    def _take_tokens(self, peer: bytes, message: Tokens) -> None:
        request = self._requests.find(peer, message.request_id)
        if request is None:
            text = "the controller does not know this request: it has ended, or the controller was started again"
            failed = (Code.ENGINE_NOT_READY, self._stopping) if self._stopping else (Code.ENGINE_FAILED, text)
            self._requests.post(peer, Failed(message.request_id, *failed))
            return
        refused = request.reading.refusal(message.start, message.tokens)
        if refused:
            self._requests.fail(request, Code.INVALID_VALUE, refused)
            return
        request.reading.push(message.tokens, message.final, self._requests.now)
        if message.final and not request.reading.received and request.work.kind != "encoding":
            self._requests.fail(request, Code.EMPTY_INPUT, "the prompt has no tokens; send at least one")
        elif self._tokens_fit(request):
            self._answers.settle(request)

    def _tokens_fit(self, request: Request) -> bool:
        """Return whether the model can do the work and knows all queued tokens; fails the request where not."""
        model = self._requests.model
        if model is None:
            return True
        rows = request.work.rows
        text = misfit(model, request.work, request.reading.received)
        outside = request.reading.queue.first_outside(model.vocab_size, marked=rows is not None and rows.marked)
        if outside is not None:
            text = f"token {outside} is not in the vocabulary of {model.vocab_size} tokens"
        code = Code.INVALID_VALUE
        if not text and (text := too_long(model, request.fed) or self._states.misfit(request)):
            code = Code.CONTEXT_LENGTH_EXCEEDED
        if text:
            self._requests.fail(request, code, text)
        return not text

    def set_model(self, model: LoadedModel) -> None:
        """Take in the model that the ranks have loaded, and check the tokens that came before it was known."""
        self._requests.model = model
        for request in self._requests:
            request.end_blocks_at(self._requests.chunk)
            if self._states.expect(request) and self._tokens_fit(request):
                self._requests.grant(request)

    # ---- time ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what waits; notice dead or hanging API processes, and requests whose tokens stopped coming."""
        self._requests.flush()
        for request in self._requests:
            self._check_deadlines(request)
        if self._requests.now - self._probed_at > API_PROBE_S:
            self._probed_at = self._requests.now
            self._requests.probe()

    def _check_deadlines(self, request: Request) -> None:
        now, reading, patience_s = self._requests.now, request.reading, self._settings.tokens_deadline_s
        if request.deadline_passed(now) and not request.keeping.ranks_done:
            text = (
                f"its deadline of {request.terms.deadline_s:g} s has passed: {reading.dispatched} of the "
                f"{reading.received} tokens that came were read, and {request.drawing.sent} drawn"
            )
            self._requests.fail(request, Code.DEADLINE_EXCEEDED, text)
        elif not reading.final and reading.received < reading.credit and now - reading.heard_at > patience_s:
            text = f"no tokens came for {patience_s:g} s; send the request again"
            self._requests.fail(request, Code.BODY_TIMEOUT, text)

    # ---- the end -------------------------------------------------------------------------------

    def drain(self, text: str) -> None:
        """Refuse new requests as not ready; open ones go on."""
        self._stopping = text

    def stop(self, text: str) -> None:
        """End every open request as one that another controller may do, and refuse new ones as not ready."""
        self._stopping = text
        for request in self._requests:
            self._requests.fail(request, Code.STOPPING, text)


def contradiction_in(work: OpenWork) -> str:
    """Say why no engine does this work; empty when one does. Only a session reads, draws and keeps states at once."""
    if work.kind == "session":
        return "states of a prompt are kept of completions only" if work.keep.at else ""
    if (work.rows is None) == (work.draw is None):
        return "needed is either the rows of an encoding or how the tokens of a completion are drawn"
    if work.keep.every:
        return "states at multiples of a number of tokens are kept of sessions only"
    if work.rows is not None and (work.begin is not None or work.keep.at):
        return "an encoding that is no session begins with no stored state and keeps none"
    return ""


def misfit(model: LoadedModel, work: OpenWork, received: int) -> str:
    """Say why the model cannot do this work, of which `received` tokens have come; empty when it can."""
    rows, sampling = work.rows, work.draw
    unknown = [] if sampling is None else [token for token in sampling.logit_bias if token >= model.vocab_size]
    if unknown:
        return f"logit_bias names token {unknown[0]}; the vocabulary has {model.vocab_size} tokens"
    if not model.writes and work.kind != "encoding":
        return "this model makes vectors of texts and cannot write any"
    longest = model.text_tokens
    if longest is None or rows is None:
        asks = rows is not None and rows.pooling == MODEL_POOLING
        return "this model has no pooling of its own; pool by mean or last" if asks else ""
    if rows.granularity != "token" and rows.pooling != MODEL_POOLING:
        return f"this model pools in a way of its own; pooling must be {MODEL_POOLING!r}"
    if rows.granularity == "window" and rows.window > longest:
        return f"a window of {rows.window} tokens is over the {longest} that this model reads at once"
    if rows.granularity == "document" and received > longest:
        return f"a text of {received} tokens or more is over the {longest} that this model reads at once"
    return ""


def too_long(model: LoadedModel, fed: int) -> str:
    """Say why `fed` tokens are too many for any engine or for the positions that this model has learned; else empty."""
    longest = min(LONGEST_TEXT, model.positions or LONGEST_TEXT)
    if fed <= longest:
        return ""
    has = "this model has learned positions for" if model.positions else "a text may have"
    return f"with those to draw the text has {fed} tokens, and {has} {longest}: send a shorter text, or draw fewer"


def refusal(
    new: Request, others: Iterable[Request], *, max_open: int, max_waiting_tokens: int, pace: Pace
) -> tuple[str, int] | None:
    """Return why there is no room for one more request, and in how many seconds there may be; None when there is room.

    Counted is the work of its own class and of more urgent ones: less urgent work does not keep it waiting. A request
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
    """Estimate the seconds that `tokens` take; the least wait while the ranks' speed is not known."""
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, math.ceil(tokens * pace.token_s)))
