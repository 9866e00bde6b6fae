"""Stored states between API processes and the files of this controller: those that requests begin with, and back.

A state comes in pieces as far as credit was given, is checked as it comes, and lies in a file; never whole in memory.
What the ranks have saved goes out the same way, one state after the other, as far as its reader gives credit.
"""

from typing import final

from dist_attn.control.keeping import Arrival
from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.state_files import StateKeeper
from dist_attn.errors import StateMismatchError, WireError
from dist_attn.wire.manifest import report_restore, require_same_model
from dist_attn.wire.messages import BeginState, Checkpoint, Restored, StateCredit, StatePiece
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.snapshot import largest_snapshot
from dist_attn_api.codes import Code

PIECE_BYTES = 1 << 20


@final
class StateTransfer:
    """The states of all requests that come or go; `keeper` holds their bytes."""

    def __init__(self, requests: OpenRequests, keeper: StateKeeper) -> None:
        self._requests = requests
        self._keeper = keeper

    # ---- in ------------------------------------------------------------------------------------

    def expect(self, request: Request) -> bool:
        """Let the state come that a request begins with, once the model is known; whether its tokens may come."""
        model, begin, keeping = self._requests.model, request.work.begin, request.keeping
        if model is None or not request.has_states:
            return not request.has_states
        if model.manifest is None or model.state_bytes is None:
            text = "sessions are not offered by this model: what it knows of a text is no state of one size"
            self._requests.fail(request, Code.INVALID_VALUE, text)
            return False
        if begin is None or keeping.arrival is not None or keeping.saved is not None:
            return True
        limit = largest_snapshot(model.state_bytes, model.vocab_size)
        if not 0 < begin.num_bytes <= limit:
            text = f"a state of {begin.num_bytes} bytes was announced; one of this model has up to {limit}"
            self._requests.fail(request, Code.INVALID_STATE, text)
            return False
        self._grant(request, begin, keeping.expect(begin.num_bytes, limit))
        return True

    def take_piece(self, request: Request, piece: StatePiece) -> bool:
        """Take a piece; true when the state is whole now, and belongs to this model."""
        arrival, begin = request.keeping.arrival, request.work.begin
        if arrival is None or begin is None or not arrival.due(piece):
            text = f"bytes [{piece.start}, {piece.start + len(piece.data)}) of a state came that were not due"
            self._requests.fail(request, Code.INVALID_VALUE, text)
            return False
        try:
            arrival.feed(piece)
            if not self._keeper.begin(request.number, piece.start, piece.data):
                raise OSError
            if arrival.received < begin.num_bytes:
                self._grant(request, begin, arrival)
                return False
            self._restore(request, begin, arrival)
        except StateMismatchError as error:
            self._requests.fail(request, Code.STATE_MISMATCH, str(error))
        except WireError as error:
            self._requests.fail(request, Code.INVALID_STATE, str(error))
        except OSError:
            self._requests.fail(request, Code.ENGINE_FAILED, "the state could not be written to the controller's disk")
        return request.is_restored

    def _restore(self, request: Request, begin: BeginState, arrival: Arrival) -> None:
        """All bytes have come: see what they are.

        Raises: WireError, StateMismatchError, OSError.
        """
        header, model = arrival.parser.finish().header, self._requests.model
        assert model is not None and model.manifest is not None
        require_same_model(header.manifest.model, model.manifest.model)
        if header.position != begin.position:
            raise WireError(f"the state stands at {header.position}, and {begin.position} was announced")
        report = report_restore(
            header.manifest.computed, model.manifest.computed, header.position, storage=header.storage
        )
        if not request.is_session and not report.bit_exact:
            raise StateMismatchError(f"a completion goes on only from a state that changes no bit: {report.reason}")
        if not self._keeper.begun(request.number):
            raise OSError
        request.keeping.keep(SavedState(request.number, header.position, 0, begin.num_bytes, snapshot=True))
        self._requests.post(request.peer, Restored(request.request_id, report))

    def _grant(self, request: Request, begin: BeginState, arrival: Arrival) -> None:
        upto = arrival.grant()
        if upto is not None:
            self._requests.post(request.peer, StateCredit(request.request_id, begin.position, upto))

    # ---- out -----------------------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """Hand out the request's last saved state, unless that was done before a loss."""
        saved, offers = request.keeping.saved, request.keeping.offers
        assert saved is not None
        if saved.position <= offers.position:
            return
        if not self._keeper.offer(request.number, saved.ordinal):
            if request.is_session:  # a completion does without it
                self._requests.fail(
                    request, Code.ENGINE_FAILED, "a state could not be written to the controller's disk"
                )
            return
        if offers.add(saved):
            self._announce(request)

    def _announce(self, request: Request) -> None:
        saved = request.keeping.offers.announce(self._requests.now)
        checkpoint = Checkpoint(request.request_id, saved.position, saved.draws, saved.num_bytes)
        self._requests.post(request.peer, checkpoint)

    def give_up(self, request: Request) -> None:
        """Hand out no more states of a completion."""
        while request.keeping.offers.waiting:
            self._end_offer(request)
        request.keeping.ask_no_more()

    def take_credit(self, request: Request, credit: StateCredit) -> None:
        """The reader of the state that was announced takes more of it."""
        offers = request.keeping.offers
        saved = offers.grant(credit.position, credit.upto, self._requests.now)
        if saved is None:
            return
        while offers.sent < offers.credit:
            count = min(PIECE_BYTES, offers.credit - offers.sent)
            data = self._keeper.offered(request.number, saved.ordinal, offers.sent, count)
            if len(data) != count and not request.is_session:
                self.give_up(request)
                return
            if len(data) != count:
                self._requests.fail(request, Code.ENGINE_FAILED, "a saved state cannot be read any more")
                return
            piece = StatePiece(request.request_id, credit.position, offers.sent, data)
            offers.advance(count)
            self._requests.post(request.peer, piece)
        if offers.sent == saved.num_bytes:
            self._end_offer(request)
            if offers.waiting:
                self._announce(request)

    def _end_offer(self, request: Request) -> None:
        offers = request.keeping.offers
        self._keeper.end_offer(request.number, offers.waiting[0].ordinal)
        offers.pop()
