"""The saved states of open requests: when one is asked for, which of them count, what is handed out, and how it ends.

A state is saved for the case of a loss after so many tokens or draws, or so much time, and where the API asked for it.
"""

from collections.abc import Iterator
from typing import final

from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateKeeper
from dist_attn.control.state_transfer import StateTransfer
from dist_attn.wire.messages import FinishDrawing, StateCredit, StatePiece
from dist_attn.wire.rank_messages import SavedState
from dist_attn_api.codes import Code

FINISH_LAG = 64  # draws that a reader may be behind when it finds that it has had enough
SAVED_BYTES_PER_S = 16 << 20  # of all requests together, where time alone asks for it


@final
class States:
    """What is done about the states of requests; `keeper` holds their bytes."""

    def __init__(self, requests: OpenRequests, settings: ControlSettings, keeper: StateKeeper) -> None:
        self._requests = requests
        self._keeper = keeper
        self._transfer = StateTransfer(requests, keeper)
        self._lag = min(FINISH_LAG, settings.save_draws)
        self._patience_s = settings.tokens_deadline_s
        self._reader_patience_s = settings.reader_deadline_s
        self._save_draws, self._save_s = settings.save_draws, settings.save_s
        self.save_tokens = settings.save_tokens * settings.ranks
        """A state is saved after so many tokens, of all ranks together."""

    # ---- from the API --------------------------------------------------------------------------

    def expect(self, request: Request) -> bool:
        """Let the state come that a request begins with, once the model is known; whether its tokens may come."""
        return self._transfer.expect(request)

    def receive(self, request: Request, message: StatePiece | StateCredit | FinishDrawing) -> None:
        """Take a message about the states of a request."""
        request.reading.hear(self._requests.now)
        match message:
            case StatePiece():
                if self._transfer.take_piece(request, message):
                    self._requests.grant(request)
                    self.settle(request)
            case StateCredit():
                self._transfer.take_credit(request, message)
                self.settle(request)
            case FinishDrawing(drawn=drawn) if request.is_session:
                self._finish_drawing(request, drawn)

    def _finish_drawing(self, request: Request, drawn: int) -> None:
        """A stored session shall stand after its first `drawn` drawn tokens, or the first state after them."""
        drawing = request.drawing
        if request.keeping.ranks_done or not drawing.finish_after(drawn):
            return
        if drawing.rewinding:
            self.rewind_if_due(request)
        elif drawing.complete:
            self.commit(request)

    def rewind_if_due(self, request: Request) -> None:
        """The ranks have drawn more than shall count, and owe nothing: they do it again from the last saved state."""
        if not request.drawing.rewinding or request.drawing.owed:
            return
        if request.keeping.close():
            self._requests.close(request.number)
        request.rewind()
        self.settle(request)

    # ---- to the ranks --------------------------------------------------------------------------

    @property
    def any_awaited(self) -> bool:
        """Whether a state shall be saved though there may be no other work."""
        return any(request.awaits_save for request in self._requests)

    def save_is_due(self, request: Request) -> bool:
        """Whether it has gone far since its state was asked for: in tokens, in draws, or in time.

        By time ranks that are lost every few seconds get on, by what was saved in between.
        """
        if self._requests.model is None or self._requests.model.state_bytes is None:
            return False
        (tokens, draws), (tokens_then, draws_then) = request.here, request.keeping.asked_at
        far = tokens - tokens_then >= self.save_tokens or draws - draws_then >= self._save_draws
        further = request.here != request.keeping.asked_at
        return far or (further and self._requests.now - request.keeping.asked_s >= self._save_every_s)

    @property
    def _save_every_s(self) -> float:
        """How long a request goes on until its state is saved: longer where all open ones' states are many bytes."""
        state_bytes = 0 if self._requests.model is None else self._requests.model.state_bytes or 0
        return max(self._save_s, len(self._requests) * state_bytes / SAVED_BYTES_PER_S)

    def parts(self, number: int) -> Iterator[bytes]:
        """The last saved state of a request, in parts that fit into messages."""
        return self._keeper.parts(number)

    # ---- from the ranks ------------------------------------------------------------------------

    def take_saved(self, saved: SavedState) -> None:
        """A rank has sent a state whole: work may be done again from it, once no other rank has rows before it."""
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
        """Let the states count up to which every rank's rows are back: those of a slower one would be lost.

        They count in the order in which they were asked for: two ranks may be heard the other way round.
        """
        keeping = request.keeping
        while (saved := keeping.saves.first) is not None and self._may_count(request, saved):
            keeping.saves.pop()
            if saved.draws > request.drawing.most:
                continue  # its reader has had enough before
            if self._keeper.commit(request.number, saved.ordinal):
                request.commit(saved)
                if request.hands_out(saved):
                    self._transfer.offer(request)
        request.end_swap()
        if keeping.swapping_out and not keeping.saves.pending:
            text = "it had to make room for others, and its state could not be kept"
            self._requests.fail(request, Code.ENGINE_FAILED, text)
            return
        self.settle(request)

    def _may_count(self, request: Request, saved: SavedState) -> bool:
        if not request.is_session:
            # What comes with a draw is behind all of the text.
            return saved.draws > 0 or saved.position <= request.reading.done
        if request.reading.tokens_in(saved) > request.reading.done:
            return False
        # Its reader may still want to go back to a token before it, which a state cannot.
        drawing = request.drawing
        return not saved.draws or saved.draws + self._lag <= drawing.sent or drawing.complete

    # ---- the end -------------------------------------------------------------------------------

    def end_drawing(self, request: Request) -> None:
        """The last token was drawn and sent."""
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
            self._transfer.offer(request)
            self._requests.post_rows(request, request.reading.last_rows())
        if not keeping.offers.waiting and self._requests.get(request.number) is not None:
            self._requests.end(request)

    def _leave_ranks(self, request: Request) -> None:
        if request.finish():
            self._requests.close(request.number)

    def ranks_lost(self) -> None:
        """What was saved and had not come whole is lost; requests that only wait for that have nothing to wait for."""
        self._keeper.forget_unfinished()
        for request in self._requests:
            # Also of one that the lost ranks no longer worked on: its place went to another as soon as an earlier state
            # of the same position was here.
            request.keeping.saves.clear()
            if request.keeping.ranks_done:
                self.settle(request)

    def tick(self, request: Request) -> None:
        """Notice a state that stopped coming, and one that nobody fetches: a completion does without it."""
        now, keeping = self._requests.now, request.keeping
        if keeping.arrival is not None and now - request.reading.heard_at > self._patience_s:
            text = f"nothing came of the state to begin with for {self._patience_s:g} s"
            self._requests.fail(request, Code.BODY_TIMEOUT, text)
        elif keeping.offers.waiting and now - keeping.offers.since > self._reader_patience_s:
            if not request.is_session:
                self._transfer.give_up(request)
                self.settle(request)
                return
            text = f"a state of the session was not fetched for {self._reader_patience_s:g} s"
            self._requests.fail(request, Code.BODY_TIMEOUT, text)
