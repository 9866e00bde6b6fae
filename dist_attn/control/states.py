"""The saved states of open requests: asks the ranks for them, decides which count, and hands them to the API.

A state is saved after so many tokens or draws, or so much time, in case ranks are lost, and where the API asked for it.
The state that a request begins with arrives in pieces as far as credit was given; each is checked and written to a
file, so it is never whole in memory. States that the ranks have saved go out the same way, one after the other.
"""

import dataclasses
from collections.abc import Iterator
from typing import final

from dist_attn.control.keeping import Arrival
from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.scheduler import RequestView
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateFiles
from dist_attn.errors import StateMismatchError, WireError
from dist_attn.wire.manifest import report_restore, require_same_model
from dist_attn.wire.messages import BeginState, Checkpoint, FinishDrawing, Restored, StateCredit, StatePiece
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.snapshot import largest_snapshot
from dist_attn.wire.specs import tokens_with_room
from dist_attn_api.errors import Code

PIECE_BYTES = 1 << 20
FINISH_LAG = 64  # draws that a reader may be behind when it finds that it has had enough
SAVED_BYTES_PER_S = 16 << 20  # of all requests together, where time alone asks for it


@final
class States:
    """The saved states of all open requests; `keeper` holds their bytes."""

    def __init__(self, requests: OpenRequests, settings: ControlSettings, keeper: StateFiles) -> None:
        self._requests = requests
        self._keeper = keeper
        self._lag = min(FINISH_LAG, settings.save_draws)
        self._patience_s = settings.tokens_deadline_s
        self._reader_patience_s = settings.reader_deadline_s
        self._save_draws, self._save_s = settings.save_draws, settings.save_s
        self._ranks, self._state_bytes = settings.ranks, settings.state_bytes
        self.save_tokens = settings.save_tokens * settings.ranks
        """The tokens, of all ranks together, after which a state is saved."""

    # ---- from the API --------------------------------------------------------------------------

    def expect(self, request: Request) -> bool:
        """Let the state that a request begins with come, once the model is known; true if its tokens may come now."""
        model, begin, keeping = self._requests.model, request.work.begin, request.keeping
        if model is None or not request.has_states:
            return not request.has_states
        if model.manifest is None or model.state_bytes is None:
            text = "sessions are not offered by this model: it has no state of a text that could be stored"
            self._requests.fail(request, Code.INVALID_VALUE, text)
            return False
        if begin is None or keeping.arrival is not None or keeping.saved is not None:
            return True
        limit = largest_snapshot(model.state_bytes_at(begin.position), model.vocab_size)
        if not 0 < begin.num_bytes <= limit:
            text = (
                f"a state of {begin.num_bytes} bytes was announced; one of this model has up to {limit} at token "
                f"{begin.position}"
            )
            self._requests.fail(request, Code.INVALID_STATE, text)
            return False
        self._grant(request, begin, keeping.expect(begin.num_bytes, limit))
        return True

    def receive(self, request: Request, message: StatePiece | StateCredit | FinishDrawing) -> None:
        """Take a message about the states of a request."""
        request.reading.hear(self._requests.now)
        match message:
            case StatePiece():
                if self._take_piece(request, message):
                    self._requests.grant(request)
                    self.settle(request)
            case StateCredit():
                self._take_credit(request, message)
                self.settle(request)
            case FinishDrawing(drawn=drawn) if request.is_session:
                self._finish_drawing(request, drawn)

    def _finish_drawing(self, request: Request, drawn: int) -> None:
        """End a session's drawing after its first `drawn` tokens, or at its last saved state where that is further."""
        drawing = request.drawing
        if request.keeping.ranks_done or not drawing.finish_after(drawn):
            return
        if drawing.rewinding:
            self.rewind_if_due(request)
        elif drawing.complete:
            self.commit(request)

    def rewind_if_due(self, request: Request) -> None:
        """Go back to the last saved state if more was drawn than shall count, once the ranks owe nothing."""
        if not request.drawing.rewinding or request.drawing.owed:
            return
        if request.keeping.close():
            self._requests.close(request.number)
        request.rewind()
        self.settle(request)

    def _take_piece(self, request: Request, piece: StatePiece) -> bool:
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
        """Check the state that has come whole, and begin the request with it.

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

    # ---- to the API ----------------------------------------------------------------------------

    def _offer(self, request: Request) -> None:
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

    def _give_up(self, request: Request) -> None:
        """Hand out no more states of a completion."""
        while request.keeping.offers.waiting:
            self._end_offer(request)
        request.keeping.ask_no_more()

    def _take_credit(self, request: Request, credit: StateCredit) -> None:
        """Send the reader of the announced state as much more as its credit allows."""
        offers = request.keeping.offers
        saved = offers.grant(credit.position, credit.upto, self._requests.now)
        if saved is None:
            return
        while offers.sent < offers.credit:
            count = min(PIECE_BYTES, offers.credit - offers.sent)
            data = self._keeper.offered(request.number, saved.ordinal, offers.sent, count)
            if len(data) != count and not request.is_session:
                self._give_up(request)
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

    # ---- to the ranks --------------------------------------------------------------------------

    @property
    def any_awaited(self) -> bool:
        """Return whether a state is to be saved though there may be no other work."""
        return any(request.awaits_save for request in self._requests)

    def save_is_due(self, request: Request) -> bool:
        """Return whether the request has gone far since a state of it was asked for: in tokens, in draws, or in time.

        Time counts so that work advances even if ranks are lost every few seconds: it goes on from a saved state.
        """
        if not self.may_save(request):
            return False
        (tokens, draws), (tokens_then, draws_then) = request.here, request.keeping.asked_at
        far = tokens - tokens_then >= self.save_tokens or draws - draws_then >= self._save_draws
        further = request.here != request.keeping.asked_at
        waited_s = self._requests.now - request.keeping.asked_s
        own_s = self._size(request, tokens + draws) / SAVED_BYTES_PER_S
        if self._grows and waited_s < own_s and tokens + draws < 2 * (tokens_then + draws_then):
            return False  # a state as large as its text, saved at even distances, would take the square of it
        return far or (further and waited_s >= max(self._save_s, len(self._requests) * own_s))

    def may_save(self, request: Request) -> bool:
        """Return whether one rank has the whole state; an encoding's keys lie on the ranks that read them."""
        model = self._requests.model
        if model is None or model.state_bytes is None:
            return False
        return not self._is_spread(request)

    def _is_spread(self, request: Request) -> bool:
        return self._grows and self._ranks > 1 and request.work.draw is None and not request.is_session

    @property
    def _grows(self) -> bool:
        return self._requests.model is not None and self._requests.model.token_bytes > 0

    # ---- how large they are --------------------------------------------------------------------

    def _size(self, request: Request, tokens: int) -> int:
        """Bytes of the request's state in a rank after so many tokens."""
        model = self._requests.model
        size = 0 if model is None else model.state_bytes_at(tokens)
        return -(-size // self._ranks) if self._is_spread(request) else size

    def misfit(self, request: Request) -> str:
        """Say why a state that grows with the text will not fit into a rank; empty when it does."""
        size = self._room(request)
        if size <= self._state_bytes:
            return ""
        return (
            f"a text of {request.length} tokens, with those to draw, takes {size} bytes of state in a rank; the limit "
            f"of this engine is {self._state_bytes} (engine.state_bytes): send a shorter text, or draw fewer tokens"
        )

    def _room(self, request: Request) -> int:
        """The bytes that the request will take in a rank where states grow; room is added where tokens are drawn."""
        if not self._grows:
            return 0
        length = request.length if request.work.draw is None else tokens_with_room(request.length)
        return self._size(request, length)

    def in_view(self, view: RequestView, request: Request) -> RequestView:
        """The scheduler's view of the request, with the size of its state where that grows with the text."""
        if not self._grows:
            return view
        swappable = view.swappable and self.may_save(request)
        return dataclasses.replace(view, swappable=swappable, state_bytes=self._room(request))

    def parts(self, number: int) -> Iterator[bytes]:
        """The last saved state of a request, in parts that fit into messages."""
        return self._keeper.parts(number)

    # ---- from the ranks ------------------------------------------------------------------------

    def take_saved(self, saved: SavedState) -> None:
        """Take a state that a rank has sent whole; it counts once no other rank owes rows before its position."""
        request = self._requests.get(saved.request)
        if request is None:
            self._keeper.drop(saved.request)
            return
        saves = request.keeping.saves
        if not saves.awaits(saved.ordinal):
            return
        if self._keeper.finish(saved.request, saved.ordinal, saved.num_bytes):
            saves.take(saved)
        elif request.is_session:
            text = "the session's state could not be written to the controller's disk"
            self._requests.fail(request, Code.ENGINE_FAILED, text)
            return
        else:
            saves.give_up(saved.ordinal)
        self.commit(request)

    def commit(self, request: Request) -> None:
        """Commit the states up to which every rank's rows are back; from a later one a slower rank's would be missing.

        They count in the order in which they were asked for; two ranks' answers may arrive in the other order.
        """
        keeping = request.keeping
        while (saved := keeping.saves.first) is not None and self._may_count(request, saved):
            keeping.saves.pop()
            if saved.draws > request.drawing.most:
                continue  # its reader has had enough before
            if self._keeper.commit(request.number, saved.ordinal):
                request.commit(saved)
                if request.hands_out(saved):
                    self._offer(request)
        request.end_swap()
        if keeping.swapping_out and not keeping.saves.pending:
            text = "it made room for others, and its state could not be kept: see that the controller's disk has room"
            self._requests.fail(request, Code.ENGINE_FAILED, text)
            return
        self.settle(request)

    def _may_count(self, request: Request, saved: SavedState) -> bool:
        if not request.is_session:
            # A state that comes with a draw is behind all of the text.
            return saved.draws > 0 or saved.position <= request.reading.done
        if request.reading.tokens_in(saved) > request.reading.done:
            return False
        # Its reader may still want to go back to a token before it, which a state cannot.
        drawing = request.drawing
        return not saved.draws or saved.draws + self._lag <= drawing.sent or drawing.complete

    # ---- the end -------------------------------------------------------------------------------

    def end_drawing(self, request: Request) -> None:
        """Note that the last token was drawn and sent."""
        if request.is_session:
            self.commit(request)
        elif request.keeping.states_at:
            self._leave_ranks(request)
            self.settle(request)
        else:
            self._requests.remove(request, "done")

    def settle(self, request: Request) -> None:
        """End a request whose last state is here, once all that it is to hand out has been fetched."""
        if self._requests.get(request.number) is None:
            return
        keeping = request.keeping
        if not request.is_session:
            if keeping.ranks_done and not keeping.saves.pending and not keeping.offers.waiting:
                self._requests.end(request)
            return
        if not request.is_at_its_end:
            return
        if not keeping.ranks_done:
            self._leave_ranks(request)
            self._offer(request)
            self._requests.post_rows(request, request.reading.last_rows())
        if not keeping.offers.waiting and self._requests.get(request.number) is not None:
            self._requests.end(request)

    def _leave_ranks(self, request: Request) -> None:
        if request.finish():
            self._requests.close(request.number)

    def ranks_lost(self) -> None:
        """Drop states that had not come whole; requests that only wait for such a state end."""
        self._keeper.forget_unfinished()
        for request in self._requests:
            # Also of one that the lost ranks no longer worked on: its place went to another as soon as an earlier state
            # of the same position was here.
            request.keeping.saves.clear()
            if request.keeping.ranks_done:
                self.settle(request)

    def tick(self, request: Request) -> None:
        """Notice a state that stopped coming, and one that is not fetched: a completion does without it."""
        now, keeping = self._requests.now, request.keeping
        if keeping.arrival is not None and now - request.reading.heard_at > self._patience_s:
            text = f"nothing came of the state to begin with for {self._patience_s:g} s"
            self._requests.fail(request, Code.BODY_TIMEOUT, text)
        elif keeping.offers.waiting and now - keeping.offers.since > self._reader_patience_s:
            if not request.is_session:
                self._give_up(request)
                self.settle(request)
                return
            text = f"a state of the session was not fetched for {self._reader_patience_s:g} s"
            self._requests.fail(request, Code.BODY_TIMEOUT, text)
