"""The side of the controller that faces the API processes: admits requests, grants credit, takes tokens, answers."""

import secrets
from collections.abc import Callable
from itertools import count

import msgspec
import numpy as np
import structlog

from dist_attn.control.admission import misfit
from dist_attn.control.backlog import refusal
from dist_attn.control.outboxes import Outboxes
from dist_attn.control.pace import Pace
from dist_attn.control.sessions import Session
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_desk import StateDesk
from dist_attn.control.state_files import StateKeeper
from dist_attn.rank_link.rows import RowAssembler, RowBatch
from dist_attn.wire.messages import (
    Accepted,
    AnyMessage,
    Cancel,
    Credit,
    EncodingDone,
    Failed,
    Generated,
    OpenCompletion,
    OpenEncoding,
    Progress,
    Rows,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.rank_messages import RankHello, RowPieces
from dist_attn.wire.session_messages import FinishDrawing, OpenSession, StateCredit, StatePiece
from dist_attn.wire.sockets import Sent
from dist_attn_api.codes import Code

__all__ = ["Desk"]

ROWS_MESSAGE_BYTES = 256 << 10
PROBE_S = 2.0
SAVED_BYTES_PER_S = 16 << 20  # of all requests together, where time alone asks for it
SUSPECT = 2  # losses after which it is worked on without others that are suspect too

log = structlog.get_logger("dist_attn.control")


class Desk:
    """Every open request by number, in order of arrival. `send` hands a message to ZeroMQ and never waits."""

    def __init__(
        self, settings: ControlSettings, send: Callable[[bytes, AnyMessage], Sent], states: StateKeeper
    ) -> None:
        self._settings = settings
        self.states = states
        self._chunk = settings.ranks * settings.chunk_tokens
        self.save_tokens, self.save_draws = settings.save_tokens * settings.ranks, settings.save_draws
        self._outboxes = Outboxes(send, settings.reader_deadline_s)
        self._numbers = count(1)
        self._by_name: dict[tuple[bytes, str], Session] = {}
        self._probed_at = 0.0
        self.now = 0.0
        self.pace = Pace()
        self.standing = StateDesk(self, settings, states)
        self.model: RankHello | None = None
        self.sessions: dict[int, Session] = {}
        self.closing: list[int] = []
        """Ended sessions whose state the ranks still hold."""
        self._stopping = ""
        self._furthered = False

    # ---- from the API --------------------------------------------------------------------------

    def receive(self, peer: bytes, message: AnyMessage, now: float) -> None:
        """Take one message of an API process."""
        self.now = now
        match message:
            case OpenEncoding() | OpenCompletion() | OpenSession():
                self._open(peer, message)
            case Tokens():
                self._take_tokens(peer, message)
            case StatePiece() | StateCredit() | FinishDrawing():
                session = self._by_name.get((peer, message.request_id))
                if session is not None and session.has_states:
                    self.standing.receive(session, message)
            case Cancel(request_id=request_id):
                session = self._by_name.get((peer, request_id))
                if session is not None:
                    self.remove(session, "cancelled")
            case _:
                log.warning("unexpected message", peer=peer.hex(), kind=type(message).__name__)

    def _open(self, peer: bytes, message: OpenEncoding | OpenCompletion | OpenSession) -> None:
        name = message.request_id
        if (peer, name) in self._by_name:
            log.warning("request id is open already", request=name, peer=peer.hex())
            return
        if self._stopping:
            self.post(peer, Failed(name, Code.ENGINE_NOT_READY, self._stopping))
            return
        number = next(self._numbers)
        session = Session.opened_by(message, number, peer, self.now, self._chunk)
        if session.sampling is not None and session.sampling.seed is None:
            # The seed is settled here, so that doing the work again elsewhere draws the same tokens.
            session.sampling = msgspec.structs.replace(session.sampling, seed=secrets.randbits(63))
        limits = {"max_open": self._settings.max_open, "max_waiting_tokens": self._settings.max_waiting_tokens}
        refused = refusal(session, self.sessions.values(), **limits, pace=self.pace)
        if refused is not None:
            self.post(peer, Failed(name, Code.OVERLOADED, *refused))
            return
        self.sessions[session.number] = self._by_name[peer, name] = session
        self.post(peer, Accepted(name))
        if self.standing.expect(session):
            self.grant(session)

    def _take_tokens(self, peer: bytes, message: Tokens) -> None:
        session = self._by_name.get((peer, message.request_id))
        if session is None:
            text = "the controller does not know this request: it has ended, or the controller was started again"
            failed = (Code.ENGINE_NOT_READY, self._stopping) if self._stopping else (Code.ENGINE_FAILED, text)
            self.post(peer, Failed(message.request_id, *failed))
            return
        number, rest = divmod(len(message.tokens), 4)
        stop = message.start + number
        if rest or session.final or message.start != session.received or stop > session.credit:
            text = (
                f"tokens [{message.start}, {stop}) of {len(message.tokens)} bytes do not follow: needed are whole "
                f"int32 from {session.received} up to {session.credit}" + (", none after the end" * session.final)
            )
            self.fail(session, Code.INVALID_VALUE, text)
            return
        if not len(session.queue):
            session.waiting_since = self.now
        session.queue.push(message.tokens)
        session.received, session.final, session.heard_at = stop, message.final, self.now
        if session.final and not session.received and session.kind != "encoding":
            self.fail(session, Code.EMPTY_INPUT, "the prompt has no tokens; send at least one")
        elif self._tokens_fit(session):
            self.settle(session)

    def _tokens_fit(self, session: Session) -> bool:
        """Whether the model can do this and knows all queued tokens; otherwise the request fails."""
        if self.model is None:
            return True
        text = misfit(self.model, session.rows, session.sampling, session.received)
        outside = session.queue.first_outside(self.model.vocab_size)
        if outside is not None:
            text = f"token {outside} is not in the vocabulary of {self.model.vocab_size} tokens"
        if text:
            self.fail(session, Code.INVALID_VALUE, text)
        return not text

    # ---- from the ranks ------------------------------------------------------------------------

    def set_model(self, model: RankHello) -> None:
        """What the ranks have loaded; tokens that came before it was known are checked now."""
        self.model = model
        for session in list(self.sessions.values()):
            if self.standing.expect(session) and self._tokens_fit(session):
                self.grant(session)

    def take_pieces(self, pieces: RowPieces) -> None:
        """Add row pieces of a step to their request and send the rows that are complete.

        Raises: WireError if they do not fit.
        """
        session = self.sessions.get(pieces.session)
        form = None if session is None or self.model is None else session.row_form(self.model.hidden_size)
        if session is None or form is None:
            return
        if session.assembler is None:
            session.assembler = RowAssembler(*form, session.begin.position if session.begin else 0)
        batches = session.assembler.add(pieces, session.received if session.final else None)
        self.post_rows(session, batches)
        self.settle(session)

    def take_draw(self, number: int, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Send a drawn token on; the end token and `max_tokens` end the request."""
        session = self.sessions.get(number)
        if session is None or session.sampling is None or self.model is None:
            return
        session.draws_back += 1
        self._furthered |= session.progress(session.received, session.draws_back)
        if session.draws_back <= session.draws:
            self._compare(session, token)
        elif session.draws < session.most_draws:
            self._send_draw(session, token, logprobs)
        elif session.sampling.ends(token, self.model.end_token):
            session.draws_back = session.draws_asked  # what was asked for beyond it is not drawn
        if session.draining and session.draws_back >= session.draws_asked:
            self.standing.go_back(session)

    def _send_draw(self, session: Session, token: int, logprobs: TokenLogprobs | None) -> None:
        assert session.sampling is not None and self.model is not None
        if session.sampling.ends(token, self.model.end_token):
            told = None if logprobs is None or session.scores is None else [logprobs]
            self.post(session.peer, Generated(session.request_id, [], "stop", told))
            session.draw_limit, session.draws_back = session.draws, session.draws_asked
            self.standing.end_drawing(session)
            return
        session.draws += 1
        session.journal.draw(token)
        last = session.draws >= session.most_draws
        reason = "length" if session.draws >= session.sampling.max_tokens else "stop"
        told = None if logprobs is None else [logprobs]
        self.post(session.peer, Generated(session.request_id, [token], reason if last else None, told))
        if last:
            self.standing.end_drawing(session)

    def _compare(self, session: Session, token: int) -> None:
        """A draw that is made again must give the token that was sent; the one that was sent is fed on in any case."""
        sent = session.journal.drawn(session.draws_back - 1)
        if token != sent:
            log.error("replay differs", request=session.request_id, draw=session.draws_back, sent=sent, again=token)

    def rewind(self, reason: str) -> int:
        """The ranks are lost: every request goes back to its last saved state; how many tokens will be done again.

        A request that was there at every one of some losses in a row, and came no further, fails: it may be the cause.
        """
        self.closing.clear()
        self._furthered = False  # what the lost ranks did says nothing of the next ones
        again = 0
        for session in [s for s in self.sessions.values() if s.exposed]:
            session.count_loss()
            if session.losses >= self._settings.losses_to_fail:
                text = f"the ranks were lost {session.losses} times while they worked on this request ({reason})"
                self.fail(session, Code.ENGINE_FAILED, text)
            else:
                again += session.rewind()
        self.standing.ranks_lost()
        self.closing.clear()
        return again

    def progress(self, number: int, position: int) -> None:
        """All ranks have read a request up to here."""
        session = self.sessions.get(number)
        if session is not None:
            session.read = max(session.read, position)
            self._furthered |= session.progress(position, 0)
            self.standing.commit(session)
            if session.terms.progress:
                self.post(session.peer, Progress(session.request_id, position))
            if number in self.sessions:
                self.settle(session)

    @property
    def save_every_s(self) -> float:
        """How long a request goes on until its state is saved: longer where all open ones' states are many bytes."""
        state_bytes = 0 if self.model is None else self.model.state_bytes or 0
        return max(self._settings.save_s, len(self.sessions) * state_bytes / SAVED_BYTES_PER_S)

    def came_further(self) -> bool:
        """Whether any request has come further than ever since this was asked last."""
        further, self._furthered = self._furthered, False
        return further

    def settle(self, session: Session) -> None:
        """End an encoding whose every row has been sent, a completion of no tokens whose prompt has been read, or a
        session that stands at its end already.
        """
        if session.work is not None:
            self.standing.settle(session)
            return
        undrawn = session.sampling is not None and not session.sampling.max_tokens
        if undrawn and session.prompt_is_done and not session.ended:
            self.post(session.peer, Generated(session.request_id, [], "length"))
            self.standing.end_drawing(session)
            return
        if session.rows is None or not session.final:
            return
        if session.assembler is not None:
            self.post_rows(session, session.assembler.finish(session.received))
        if (session.assembler.position if session.assembler is not None else 0) == session.received:
            self.post(session.peer, EncodingDone(session.request_id, session.received, session.rows_sent))
            self.remove(session, "done")

    def post_rows(self, session: Session, batches: list[RowBatch]) -> None:
        if not batches:
            return
        starts = np.concatenate([batch.starts for batch in batches])
        stops = np.concatenate([batch.stops for batch in batches])
        vectors = np.concatenate([batch.vectors for batch in batches]).astype("<f4", copy=False)
        per_message = max(1, ROWS_MESSAGE_BYTES // (4 * max(1, vectors.shape[1])))
        for at in range(0, len(starts), per_message):
            part = slice(at, at + per_message)
            first_row = batches[0].first_row + at
            rows = Rows(
                session.request_id, first_row, starts[part].tolist(), stops[part].tolist(), vectors[part].tobytes()
            )
            self.post(session.peer, rows)
        session.rows_sent += len(starts)

    @property
    def unsaved(self) -> bool:
        """Whether a state shall be saved though there may be no other work."""
        return any(session.awaits_save for session in self.sessions.values())

    # ---- to the API ----------------------------------------------------------------------------

    def grant(self, session: Session) -> None:
        """Let the API send more once a good part of what it may send has been used."""
        block = self._settings.ranks * self._settings.block_tokens
        # A sequence is read whole, so there must always be credit for one.
        whole = (self.model and self.model.text_tokens) or 0
        upto = session.dispatched + max(self._settings.blocks_of_credit * block, whole)
        short = session.credit - session.dispatched < whole
        if session.restored and not session.final and (short or upto - session.credit >= min(block, upto)):
            session.credit, session.heard_at = upto, self.now
            self.post(session.peer, Credit(session.request_id, upto))

    def fail(self, session: Session, code: str, text: str) -> None:
        """End a request without its result."""
        self.post(session.peer, Failed(session.request_id, code, text))
        self.remove(session, code)

    def drain(self, text: str) -> None:
        """Refuse what comes from now on as not ready; what is open goes on."""
        self._stopping = text

    def stop(self, text: str) -> None:
        """End every open request as one that another controller may do, and refuse those that come now as not ready."""
        self._stopping = text
        for session in list(self.sessions.values()):
            self.fail(session, Code.STOPPING, text)

    def post(self, peer: bytes, message: AnyMessage) -> None:
        """Send to an API process; the requests of one that is gone end."""
        if self._outboxes.post(peer, message, self.now) is Sent.GONE:
            self._drop(peer)

    def blocked(self, session: Session) -> bool:
        """Whether its API process does not take what is sent, or it is not its turn to be tried again."""
        return self._outboxes.blocked(session.peer) or self._waits_as_suspect(session)

    def _waits_as_suspect(self, session: Session) -> bool:
        """Of the requests that may have killed the ranks, one at a time is worked on: so the guilty one is found."""
        if session.losses < SUSPECT:
            return False
        return session is not next(s for s in self.sessions.values() if s.losses >= SUSPECT)

    def tick(self, now: float) -> None:
        """Send what waits, notice API processes that died or hang, and requests whose tokens stopped coming."""
        self.now = now
        for peer in self._outboxes.flush(now):
            self._drop(peer)
        for session in list(self.sessions.values()):
            waits_for_tokens = not session.final and session.received < session.credit
            if session.deadline_passed(now) and not session.ended:
                text = (
                    f"its deadline of {session.terms.deadline_s:g} s has passed: {session.dispatched} of the "
                    f"{session.received} tokens that came were read, and {session.draws} drawn"
                )
                self.fail(session, Code.DEADLINE_EXCEEDED, text)
            elif waits_for_tokens and now - session.heard_at > self._settings.tokens_deadline_s:
                text = f"no tokens came for {self._settings.tokens_deadline_s:g} s; send the request again"
                self.fail(session, Code.BODY_TIMEOUT, text)
            else:
                self.standing.tick(session, now)
        if now - self._probed_at > PROBE_S:
            self._probed_at = now
            self._probe()

    def _probe(self) -> None:
        """See whether the API processes of waiting requests are still there, by a credit that says nothing new."""
        waiting = {session.peer: session for session in self.sessions.values() if not session.final}
        for session in waiting.values():
            if not self.blocked(session):
                self.post(session.peer, Credit(session.request_id, session.credit))

    def _drop(self, peer: bytes) -> None:
        for session in [s for s in self.sessions.values() if s.peer == peer]:
            self.remove(session, "reader gone")

    def remove(self, session: Session, outcome: str) -> None:
        if self.sessions.pop(session.number, None) is None:
            return
        del self._by_name[session.peer, session.request_id]
        self.states.drop(session.number)
        if session.opened:
            self.closing.append(session.number)
        log.info(
            "request ended",
            request=session.request_id,
            kind=session.kind,
            outcome=outcome,
            tokens=session.received,
            rows=session.rows_sent,
            drawn=session.draws,
            seconds=round(self.now - session.created_at, 3),
        )
