"""The saved states of open requests: which of them count, which are handed out, when what has them ends."""

from typing import Protocol, final

from dist_attn.control.sessions import Session
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateKeeper
from dist_attn.control.state_traffic import StateTraffic
from dist_attn.rank_link.rows import RowBatch
from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.rank_messages import RankHello, SavedState
from dist_attn.wire.session_messages import FinishDrawing, SessionDone, StateCredit, StatePiece, StatesDone
from dist_attn_api.codes import Code

__all__ = ["StateDesk"]

FINISH_LAG = 64  # draws that a reader may be behind when it finds that it has had enough


class Front(Protocol):
    """The desk that this is a part of."""

    now: float
    model: RankHello | None
    sessions: dict[int, Session]
    closing: list[int]

    def post(self, peer: bytes, message: AnyMessage) -> None: ...

    def post_rows(self, session: Session, batches: list[RowBatch]) -> None: ...

    def grant(self, session: Session) -> None: ...

    def fail(self, session: Session, code: str, text: str) -> None: ...

    def remove(self, session: Session, outcome: str) -> None: ...


@final
class StateDesk:
    """What the desk does about states. `keeper` holds their bytes."""

    def __init__(self, desk: Front, settings: ControlSettings, keeper: StateKeeper) -> None:
        self._desk = desk
        self._keeper = keeper
        self._traffic = StateTraffic(desk, keeper)
        self._lag = min(FINISH_LAG, settings.save_draws)
        self._patience_s = settings.tokens_deadline_s
        self._reader_patience_s = settings.reader_deadline_s

    # ---- from the API --------------------------------------------------------------------------

    def expect(self, session: Session) -> bool:
        """Let the state come that a request begins with, once the model is known; whether its tokens may come."""
        return self._traffic.expect(session)

    def receive(self, session: Session, message: StatePiece | StateCredit | FinishDrawing) -> None:
        """Take a message about the states of a request."""
        session.heard_at = self._desk.now
        match message:
            case StatePiece():
                if self._traffic.take_piece(session, message):
                    self._desk.grant(session)
                    self.settle(session)
            case StateCredit():
                self._traffic.take_credit(session, message, self._desk.now)
                self.settle(session)
            case FinishDrawing(drawn=drawn) if session.work is not None:
                self._finish_drawing(session, drawn)

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
                self.go_back(session)
        elif session.draws == drawn:
            self.commit(session)

    def go_back(self, session: Session) -> None:
        """The ranks have drawn more than shall count, and owe nothing: they do it again from the last saved state."""
        if session.opened:
            self._desk.closing.append(session.number)
        session.rewind()
        self.settle(session)

    # ---- from the ranks ------------------------------------------------------------------------

    def take_saved(self, saved: SavedState) -> None:
        """A rank has sent a session's state whole: its journal begins there, once no other rank has rows before it."""
        session = self._desk.sessions.get(saved.session)
        if session is None:
            self._keeper.drop(saved.session)
            return
        if not session.saves.awaits(saved.ordinal):
            return
        if self._keeper.finish(saved.session, saved.ordinal, saved.num_bytes):
            session.saves.take(saved)
        elif session.work is not None:
            text = "the session's state could not be written to the controller's disk"
            self._desk.fail(session, Code.ENGINE_FAILED, text)
            return
        else:
            session.saves.give_up(saved.ordinal)
        self.commit(session)

    def commit(self, session: Session) -> None:
        """Begin the journal at the states up to which every rank's rows are back: those of a slower one would be lost.

        They count in the order in which they were asked for: two ranks may be heard the other way round.
        """
        while (saved := session.saves.first) is not None and self._may_count(session, saved):
            session.saves.pop()
            if saved.draws > session.most_draws:
                continue  # its reader has had enough before
            if self._keeper.commit(session.number, saved.ordinal):
                session.journal.advance(session.text_position(saved), saved.draws)
                session.saved = saved
                if session.hands_out(saved):
                    self._traffic.offer(session, self._desk.now)
        session.arrived()
        if session.leaving and not session.saves.pending:
            text = "it had to make room for others, and its state could not be kept"
            self._desk.fail(session, Code.ENGINE_FAILED, text)
            return
        self.settle(session)

    def _may_count(self, session: Session, saved: SavedState) -> bool:
        if session.work is None:
            return saved.draws > 0 or saved.position <= session.read  # what comes with a draw is behind all of the text
        if session.text_position(saved) > session.read:
            return False
        # Its reader may still want to go back to a token before it, which a state cannot.
        return not saved.draws or saved.draws + self._lag <= session.draws or session.draws >= session.most_draws

    # ---- the end -------------------------------------------------------------------------------

    def end_drawing(self, session: Session) -> None:
        """The last token was drawn and sent."""
        if session.work is not None:
            self.commit(session)
        elif session.states_at:
            self._leave_ranks(session)
            self.settle(session)
        else:
            self._desk.remove(session, "done")

    def settle(self, session: Session) -> None:
        """End a request whose last state is here, once all that it is to hand out has been fetched."""
        if session.number not in self._desk.sessions:
            return
        if session.work is None:
            if session.ended and not session.saves.pending and not session.offers.waiting:
                self._desk.post(session.peer, StatesDone(session.request_id))
                self._desk.remove(session, "done")
            return
        if not session.is_at_its_end:
            return
        if not session.ended:
            self._leave_ranks(session)
            self._traffic.offer(session, self._desk.now)
            if session.assembler is not None:
                self._desk.post_rows(session, session.assembler.finish(session.received))
        if not session.offers.waiting and session.number in self._desk.sessions:
            end = session.received + session.draws
            self._desk.post(session.peer, SessionDone(session.request_id, end, session.draws, session.rows_sent))
            self._desk.remove(session, "done")

    def _leave_ranks(self, session: Session) -> None:
        session.ended = True
        if session.opened:
            self._desk.closing.append(session.number)
        session.opened, session.exposed = False, False

    def ranks_lost(self) -> None:
        """What was saved and had not come whole is lost; requests that only wait for that have nothing to wait for."""
        self._keeper.forget_unfinished()
        for session in [s for s in self._desk.sessions.values() if s.ended]:
            session.saves.clear()
            self.settle(session)

    def tick(self, session: Session, now: float) -> None:
        """Notice a state that stopped coming, and one that nobody fetches: a completion does without it."""
        if session.arrival is not None and now - session.heard_at > self._patience_s:
            text = f"nothing came of the state to begin with for {self._patience_s:g} s"
            self._desk.fail(session, Code.BODY_TIMEOUT, text)
        elif session.offers.waiting and now - session.offers.since > self._reader_patience_s:
            if session.work is None:
                self._traffic.give_up(session)
                self.settle(session)
                return
            text = f"a state of the session was not fetched for {self._reader_patience_s:g} s"
            self._desk.fail(session, Code.BODY_TIMEOUT, text)
