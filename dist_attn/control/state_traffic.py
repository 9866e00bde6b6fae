"""Stored states between API processes and the files of this controller: those that sessions begin with, and back.

A state comes in pieces as far as credit was given, is checked as it comes, and lies in a file; never whole in memory.
What the ranks have saved goes out the same way, one state after the other, as far as its reader gives credit.
"""

from typing import Protocol, final

from dist_attn.control.session_states import Arrival, Offer
from dist_attn.control.sessions import Session
from dist_attn.control.state_files import StateKeeper
from dist_attn.errors import StateMismatchError, WireError
from dist_attn.wire.manifest import report_restore, require_same_model
from dist_attn.wire.messages import AnyMessage
from dist_attn.wire.rank_messages import RankHello, SavedState
from dist_attn.wire.session_messages import Checkpoint, Restored, StateCredit, StatePiece
from dist_attn.wire.snapshot import SnapshotParser, largest_snapshot
from dist_attn_api.codes import Code

__all__ = ["StateTraffic"]

WINDOW_BYTES = 8 << 20
PIECE_BYTES = 1 << 20


class Outlet(Protocol):
    """What answers go through."""

    model: RankHello | None

    def post(self, peer: bytes, message: AnyMessage) -> None: ...

    def fail(self, session: Session, code: str, text: str) -> None: ...


@final
class StateTraffic:
    """The states of all sessions that come or go."""

    def __init__(self, outlet: Outlet, states: StateKeeper) -> None:
        self._outlet = outlet
        self._states = states

    # ---- in ------------------------------------------------------------------------------------

    def expect(self, session: Session) -> bool:
        """Let the state come that the session begins with, once the model is known; whether it can have one."""
        model, begin = self._outlet.model, session.begin
        if model is None or not session.has_states:
            return not session.has_states
        if model.manifest is None or model.state_bytes is None:
            text = "sessions are not offered by this model: what it knows of a text is no state of one size"
            self._outlet.fail(session, Code.INVALID_VALUE, text)
            return False
        if begin is None or session.arrival is not None or session.saved is not None:
            return True
        limit = largest_snapshot(model.state_bytes, model.vocab_size)
        if not 0 < begin.num_bytes <= limit:
            text = f"a state of {begin.num_bytes} bytes was announced; one of this model has up to {limit}"
            self._outlet.fail(session, Code.INVALID_STATE, text)
            return False
        session.arrival = Arrival(SnapshotParser(max_bytes=limit))
        self._grant(session, session.arrival)
        return True

    def take_piece(self, session: Session, piece: StatePiece) -> bool:
        """Take a piece; true when the state is whole now, and belongs to this model."""
        arrival, begin = session.arrival, session.begin
        stop = piece.start + len(piece.data)
        if arrival is None or begin is None or piece.start != arrival.received or stop > arrival.credit:
            text = f"bytes [{piece.start}, {stop}) of a state came that were not due"
            self._outlet.fail(session, Code.INVALID_VALUE, text)
            return False
        try:
            arrival.parser.feed(piece.data)
            arrival.received = stop
            if not self._states.begin(session.number, piece.start, piece.data):
                raise OSError
            if stop < begin.num_bytes:
                self._grant(session, arrival)
                return False
            return self._restore(session, arrival)
        except StateMismatchError as error:
            self._outlet.fail(session, Code.STATE_MISMATCH, str(error))
        except WireError as error:
            self._outlet.fail(session, Code.INVALID_STATE, str(error))
        except OSError:
            self._outlet.fail(session, Code.ENGINE_FAILED, "the state could not be written to the controller's disk")
        return False

    def _restore(self, session: Session, arrival: Arrival) -> bool:
        """All bytes have come: see what they are.

        Raises: WireError, StateMismatchError, OSError.
        """
        header, model, begin = arrival.parser.finish().header, self._outlet.model, session.begin
        assert model is not None and model.manifest is not None and begin is not None
        require_same_model(header.manifest.model, model.manifest.model)
        if header.position != begin.position:
            raise WireError(f"the state stands at {header.position}, and {begin.position} was announced")
        report = report_restore(
            header.manifest.computed, model.manifest.computed, header.position, storage=header.storage
        )
        if session.work is None and not report.bit_exact:
            raise StateMismatchError(f"a completion goes on only from a state that changes no bit: {report.reason}")
        if not self._states.begun(session.number):
            raise OSError
        session.arrival = None
        session.saved = SavedState(session.number, header.position, 0, begin.num_bytes, snapshot=True)
        self._outlet.post(session.peer, Restored(session.request_id, report))
        return True

    def _grant(self, session: Session, arrival: Arrival) -> None:
        begin = session.begin
        assert begin is not None
        upto = min(begin.num_bytes, arrival.received + WINDOW_BYTES)
        if upto > arrival.credit and (upto == begin.num_bytes or upto - arrival.credit >= WINDOW_BYTES // 2):
            arrival.credit = upto
            self._outlet.post(session.peer, StateCredit(session.request_id, begin.position, upto))

    # ---- out -----------------------------------------------------------------------------------

    def offer(self, session: Session, now: float) -> None:
        """Hand out the session's last saved state, unless that was done before a loss."""
        saved, offers = session.saved, session.offers
        assert saved is not None
        if saved.position <= offers.position:
            return
        if not self._states.offer(session.number, saved.ordinal):
            if session.work is None:
                return  # a completion does without it
            self._outlet.fail(session, Code.ENGINE_FAILED, "a state could not be written to the controller's disk")
            return
        offers.position = saved.position
        offers.waiting.append(Offer(saved))
        if len(offers.waiting) == 1:
            self._announce(session, now)

    def _announce(self, session: Session, now: float) -> None:
        session.offers.since = now
        saved = session.offers.waiting[0].saved
        self._outlet.post(session.peer, Checkpoint(session.request_id, saved.position, saved.draws, saved.num_bytes))

    def give_up(self, session: Session) -> None:
        """Hand out no more states of a completion."""
        for offer in session.offers.waiting:
            self._states.end_offer(session.number, offer.saved.ordinal)
        session.offers.waiting.clear()
        session.states_at = ()

    def take_credit(self, session: Session, credit: StateCredit, now: float) -> None:
        """The reader of the state that was announced takes more of it."""
        waiting = session.offers.waiting
        if not waiting or waiting[0].saved.position != credit.position:
            return
        session.offers.since = now
        offer = waiting[0]
        offer.credit = min(max(offer.credit, credit.upto), offer.saved.num_bytes)
        while offer.sent < offer.credit:
            count = min(PIECE_BYTES, offer.credit - offer.sent)
            data = self._states.offered(session.number, offer.saved.ordinal, offer.sent, count)
            if len(data) != count and session.work is None:
                self.give_up(session)
                return
            if len(data) != count:
                self._outlet.fail(session, Code.ENGINE_FAILED, "a saved state cannot be read any more")
                return
            self._outlet.post(session.peer, StatePiece(session.request_id, credit.position, offer.sent, data))
            offer.sent += count
        if offer.sent == offer.saved.num_bytes:
            self._states.end_offer(session.number, offer.saved.ordinal)
            waiting.popleft()
            if waiting:
                self._announce(session, now)
