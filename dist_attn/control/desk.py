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
from dist_attn.control.rows import RowAssembler, RowBatch
from dist_attn.control.sessions import Session
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateKeeper
from dist_attn.control.state_traffic import StateTraffic
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
    OpenSession,
    Progress,
    RankHello,
    RowPieces,
    Rows,
    SavedState,
    TokenLogprobs,
    Tokens,
)
from dist_attn.wire.session_messages import FinishDrawing, SessionDone, StateCredit, StatePiece
from dist_attn.wire.sockets import Sent

__all__ = ["Desk"]

ROWS_MESSAGE_BYTES = 256 << 10
PROBE_S = 2.0
FINISH_LAG = 64  # draws that a reader may be behind when it finds that it has had enough
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
        self._traffic = StateTraffic(self, states)
        self.save_tokens, self.save_draws = settings.save_tokens * settings.ranks, settings.save_draws
        self._outboxes = Outboxes(send, settings.reader_deadline_s)
        self._numbers = count(1)
        self._by_name: dict[tuple[bytes, str], Session] = {}
        self._probed_at = 0.0
        self._now = 0.0
        self.pace = Pace()
        self.model: RankHello | None = None
        self.sessions: dict[int, Session] = {}
        self.closing: list[int] = []
        """Ended sessions whose state the ranks still hold."""
        self._stopping = ""

    # ---- from the API --------------------------------------------------------------------------

    def receive(self, peer: bytes, message: AnyMessage, now: float) -> None:
        """Take one message of an API process."""
        self._now = now
        match message:
            case OpenEncoding() | OpenCompletion() | OpenSession():
                self._open(peer, message)
            case Tokens():
                self._take_tokens(peer, message)
            case StatePiece() | StateCredit() | FinishDrawing():
                session = self._by_name.get((peer, message.request_id))
                if session is not None and session.work is not None:
                    self._of_session(session, message)
            case Cancel(request_id=request_id):
                session = self._by_name.get((peer, request_id))
                if session is not None:
                    self._remove(session, "cancelled")
            case _:
                log.warning("unexpected message", peer=peer.hex(), kind=type(message).__name__)

    def _open(self, peer: bytes, message: OpenEncoding | OpenCompletion | OpenSession) -> None:
        name = message.request_id
        if (peer, name) in self._by_name:
            log.warning("request id is open already", request=name, peer=peer.hex())
            return
        if self._stopping:
            self.post(peer, Failed(name, "engine_not_ready", self._stopping))
            return
        number = next(self._numbers)
        if isinstance(message, OpenSession):
            session = Session.of_work(number, peer, self._now, message, self._chunk)
        else:
            session = Session(number, peer, name, self._now, heard_at=self._now, terms=message.terms)
            session.rows = message.rows if isinstance(message, OpenEncoding) else None
            session.sampling = message.sampling if isinstance(message, OpenCompletion) else None
        if session.sampling is not None and session.sampling.seed is None:
            # The seed is settled here, so that doing the work again elsewhere draws the same tokens.
            session.sampling = msgspec.structs.replace(session.sampling, seed=secrets.randbits(63))
        session.queued_at = self._now
        limits = {"max_open": self._settings.max_open, "max_waiting_tokens": self._settings.max_waiting_tokens}
        refused = refusal(session, self.sessions.values(), **limits, pace=self.pace)
        if refused is not None:
            self.post(peer, Failed(name, "overloaded", *refused))
            return
        self.sessions[session.number] = self._by_name[peer, name] = session
        self.post(peer, Accepted(name))
        if self._traffic.expect(session):
            self.grant(session)

    def _of_session(self, session: Session, message: StatePiece | StateCredit | FinishDrawing) -> None:
        session.heard_at = self._now
        match message:
            case StatePiece():
                if self._traffic.take_piece(session, message):
                    self.grant(session)
                    self._end_session(session)
            case StateCredit():
                self._traffic.take_credit(session, message, self._now)
                self._end_session(session)
            case FinishDrawing(drawn=drawn):
                self._finish_drawing(session, drawn)

    def _take_tokens(self, peer: bytes, message: Tokens) -> None:
        session = self._by_name.get((peer, message.request_id))
        if session is None:
            text = "the controller does not know this request: it has ended, or the controller was started again"
            failed = ("engine_not_ready", self._stopping) if self._stopping else ("engine_failed", text)
            self.post(peer, Failed(message.request_id, *failed))
            return
        number, rest = divmod(len(message.tokens), 4)
        stop = message.start + number
        if rest or session.final or message.start != session.received or stop > session.credit:
            text = (
                f"tokens [{message.start}, {stop}) of {len(message.tokens)} bytes do not follow: needed are whole "
                f"int32 from {session.received} up to {session.credit}" + (", none after the end" * session.final)
            )
            self.fail(session, "invalid_value", text)
            return
        if not len(session.queue):
            session.waiting_since = self._now
        session.queue.push(message.tokens)
        session.received, session.final, session.heard_at = stop, message.final, self._now
        if session.final and not session.received and session.kind != "encoding":
            self.fail(session, "empty_input", "the prompt has no tokens; send at least one")
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
            self.fail(session, "invalid_value", text)
        return not text

    # ---- from the ranks ------------------------------------------------------------------------

    def set_model(self, model: RankHello) -> None:
        """What the ranks have loaded; tokens that came before it was known are checked now."""
        self.model = model
        for session in list(self.sessions.values()):
            if self._traffic.expect(session) and self._tokens_fit(session):
                self.grant(session)

    def take_pieces(self, pieces: RowPieces) -> None:
        """Add row pieces of a step to their request and send the rows that are complete.

        Raises: WireError if they do not fit.
        """
        session = self.sessions.get(pieces.session)
        if session is None or session.rows is None or self.model is None:
            return
        if session.assembler is None:
            start = session.work.begin.position if session.work and session.work.begin else 0
            session.assembler = RowAssembler(session.rows, self.model.hidden_size, start)
        batches = session.assembler.add(pieces, session.received if session.final else None)
        self._post_rows(session, batches)
        self.settle(session)

    def take_draw(self, number: int, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Send a drawn token on; the end token and `max_tokens` end the request."""
        session = self.sessions.get(number)
        if session is None or session.sampling is None or self.model is None:
            return
        session.draws_back += 1
        session.progress(session.received, session.draws_back)
        if session.draws_back <= session.draws:
            self._compare(session, token)
        elif session.draws < session.most_draws:
            self._send_draw(session, token, logprobs)
        elif token == self.model.end_token:
            session.draws_back = session.draws_asked  # what was asked for beyond it is not drawn
        if session.draining and session.draws_back >= session.draws_asked:
            self._go_back(session)

    def _send_draw(self, session: Session, token: int, logprobs: TokenLogprobs | None) -> None:
        assert session.sampling is not None and self.model is not None
        if token == self.model.end_token:
            self.post(session.peer, Generated(session.request_id, [], "stop"))
            session.draw_limit, session.draws_back = session.draws, session.draws_asked
            self._end_drawing(session)
            return
        session.draws += 1
        session.journal.draw(token)
        last = session.draws >= session.most_draws
        reason = "length" if session.draws >= session.sampling.max_tokens else "stop"
        told = None if logprobs is None else [logprobs]
        self.post(session.peer, Generated(session.request_id, [token], reason if last else None, told))
        if last:
            self._end_drawing(session)

    def _end_drawing(self, session: Session) -> None:
        if session.work is None:
            self._remove(session, "done")
        else:
            self._commit(session)

    def _finish_drawing(self, session: Session, drawn: int) -> None:
        """A stored session shall stand after its first `drawn` drawn tokens, or the first state after them."""
        drawn = max(drawn, session.journal.draws)
        if session.ended or session.sampling is None or drawn >= session.most_draws:
            return
        session.draw_limit = drawn
        # While draws are made a second time, more may have been sent than are asked for now.
        session.draws = min(session.draws, drawn)
        session.journal.forget_draws(drawn)
        if session.draws_asked > drawn:
            session.draining = True
            if session.draws_back >= session.draws_asked:
                self._go_back(session)
        elif session.draws == drawn:
            self._commit(session)

    def _go_back(self, session: Session) -> None:
        """The ranks have drawn more than shall count, and owe nothing: they do it again from the last saved state."""
        if session.opened:
            self.closing.append(session.number)
        session.rewind()
        self._end_session(session)

    def _compare(self, session: Session, token: int) -> None:
        """A draw that is made again must give the token that was sent; the one that was sent is fed on in any case."""
        sent = session.journal.drawn(session.draws_back - 1)
        if token != sent:
            log.error("replay differs", request=session.request_id, draw=session.draws_back, sent=sent, again=token)

    def take_saved(self, saved: SavedState) -> None:
        """A rank has sent a session's state whole: its journal begins there, once no other rank has rows before it."""
        session = self.sessions.get(saved.session)
        if session is None:
            self.states.drop(saved.session)
            return
        if not session.saves.awaits(saved.ordinal):
            return
        if self.states.finish(saved.session, saved.ordinal, saved.num_bytes):
            session.saves.take(saved)
        elif session.work is not None:
            self.fail(session, "engine_failed", "the session's state could not be written to the controller's disk")
            return
        else:
            session.saves.give_up(saved.ordinal)
        self._commit(session)

    def _commit(self, session: Session) -> None:
        """Begin the journal at the states up to which every rank's rows are back: those of a slower one would be lost.

        They count in the order in which they were asked for: two ranks may be heard the other way round.
        """
        while (saved := session.saves.first) is not None and self._may_count(session, saved):
            session.saves.pop()
            if saved.draws > session.most_draws:
                continue  # its reader has had enough before
            if self.states.commit(session.number, saved.ordinal):
                session.journal.advance(session.text_position(saved), saved.draws)
                session.saved = saved
                if session.every and saved.position % session.every == 0:
                    self._traffic.offer(session, self._now)
        session.arrived()
        if session.leaving and not session.saves.pending:
            self.fail(session, "engine_failed", "it had to make room for others, and its state could not be kept")
            return
        self._end_session(session)

    def _may_count(self, session: Session, saved: SavedState) -> bool:
        if session.work is None:
            return saved.draws > 0 or saved.position <= session.read  # what comes with a draw is behind all of the text
        if session.text_position(saved) > session.read:
            return False
        # Its reader may still want to go back to a token before it, which a state cannot.
        lag = min(FINISH_LAG, self._settings.save_draws)
        return not saved.draws or saved.draws + lag <= session.draws or session.draws >= session.most_draws

    def _end_session(self, session: Session) -> None:
        """End a stored session whose last state is here, once all of it has been handed out."""
        if session.work is None or session.number not in self.sessions or not session.is_at_its_end:
            return
        if not session.ended:
            session.ended = True
            if session.opened:
                self.closing.append(session.number)
            session.opened, session.exposed = False, False
            self._traffic.offer(session, self._now)
            if session.assembler is not None:
                self._post_rows(session, session.assembler.finish(session.received))
        if not session.offers.waiting and session.number in self.sessions:
            end = session.received + session.draws
            self.post(session.peer, SessionDone(session.request_id, end, session.draws, session.rows_sent))
            self._remove(session, "done")

    def rewind(self, reason: str) -> int:
        """The ranks are lost: every request goes back to its last saved state; how many tokens will be done again.

        A request that was there at every one of some losses in a row, and came no further, fails: it may be the cause.
        """
        self.states.forget_unfinished()
        self.closing.clear()
        again = 0
        for session in [s for s in self.sessions.values() if s.exposed]:
            session.losses += 1
            if session.losses >= self._settings.losses_to_fail:
                text = f"the ranks were lost {session.losses} times while they worked on this request ({reason})"
                self.fail(session, "engine_failed", text)
            else:
                again += session.rewind()
        self.closing.clear()
        return again

    def progress(self, number: int, position: int) -> None:
        """All ranks have read a request up to here."""
        session = self.sessions.get(number)
        if session is not None:
            session.read = max(session.read, position)
            session.progress(position, 0)
            self._commit(session)
            if session.terms.progress:
                self.post(session.peer, Progress(session.request_id, position))

    def settle(self, session: Session) -> None:
        """End an encoding whose every row has been sent, or a session that stands at its end already."""
        if session.work is not None:
            self._end_session(session)
            return
        if session.rows is None or not session.final:
            return
        if session.assembler is not None:
            self._post_rows(session, session.assembler.finish(session.received))
        if (session.assembler.position if session.assembler is not None else 0) == session.received:
            self.post(session.peer, EncodingDone(session.request_id, session.received, session.rows_sent))
            self._remove(session, "done")

    def _post_rows(self, session: Session, batches: list[RowBatch]) -> None:
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
            session.credit, session.heard_at = upto, self._now
            self.post(session.peer, Credit(session.request_id, upto))

    def fail(self, session: Session, code: str, text: str) -> None:
        """End a request without its result."""
        self.post(session.peer, Failed(session.request_id, code, text))
        self._remove(session, code)

    def stop(self, text: str) -> None:
        """End every open request, and refuse those that come now, as not ready."""
        self._stopping = text
        for session in list(self.sessions.values()):
            self.fail(session, "engine_not_ready", text)

    def post(self, peer: bytes, message: AnyMessage) -> None:
        """Send to an API process; the requests of one that is gone end."""
        if self._outboxes.post(peer, message, self._now) is Sent.GONE:
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
        self._now = now
        for peer in self._outboxes.flush(now):
            self._drop(peer)
        for session in list(self.sessions.values()):
            waits_for_tokens = not session.final and session.received < session.credit
            if session.deadline_passed(now):
                text = (
                    f"its deadline of {session.terms.deadline_s:g} s has passed: {session.dispatched} of the "
                    f"{session.received} tokens that came were read, and {session.draws} drawn"
                )
                self.fail(session, "deadline_exceeded", text)
            elif waits_for_tokens and now - session.heard_at > self._settings.tokens_deadline_s:
                text = f"no tokens came for {self._settings.tokens_deadline_s:g} s; send the request again"
                self.fail(session, "body_timeout", text)
            elif session.arrival is not None and now - session.heard_at > self._settings.tokens_deadline_s:
                text = f"nothing came of the state to begin with for {self._settings.tokens_deadline_s:g} s"
                self.fail(session, "body_timeout", text)
            elif session.offers.waiting and now - session.offers.since > self._settings.reader_deadline_s:
                text = f"a state of the session was not fetched for {self._settings.reader_deadline_s:g} s"
                self.fail(session, "body_timeout", text)
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
            self._remove(session, "reader gone")

    def _remove(self, session: Session, outcome: str) -> None:
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
            seconds=round(self._now - session.created_at, 3),
        )
