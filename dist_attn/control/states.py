"""The saved states of open requests: asks the ranks for them, decides which count, and stores those for the API.

A state is saved after so many tokens or draws, or so much time, in case ranks are lost, and where the API asked for it.
The state that a request begins with is copied from the store and checked; a state that the ranks have saved for the API
is written there, and the API is told once it is durable: the states of a request one after the other.
"""

import dataclasses
from collections.abc import Iterator
from typing import final

import structlog

from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.requests import Request
from dist_attn.control.scheduler import RequestView
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateFiles, StoredBlob
from dist_attn.errors import DistAttnError, StateDamagedError, StateMismatchError, StorageError, WireError
from dist_attn.wire.manifest import report_restore, require_same_model
from dist_attn.wire.messages import Checkpoint, Restored
from dist_attn.wire.rank_messages import SavedState
from dist_attn.wire.snapshot import SnapshotHeader, largest_snapshot
from dist_attn.wire.specs import tokens_with_room
from dist_attn_api.errors import Code

FINISH_LAG = 64  # draws that a reader may be behind when it finds that it has had enough
SAVED_BYTES_PER_S = 16 << 20  # of all requests together, where time alone asks for it

log = structlog.get_logger("dist_attn.control")


@final
class States:
    """The saved states of all open requests; `state_files` holds their bytes."""

    def __init__(self, requests: OpenRequests, settings: ControlSettings, state_files: StateFiles) -> None:
        self._requests = requests
        self._state_files = state_files
        self._lag = min(FINISH_LAG, settings.save_draws)
        self._save_draws, self._save_s = settings.save_draws, settings.save_s
        self._ranks, self._state_bytes = settings.ranks, settings.state_bytes
        self.save_tokens = settings.save_tokens * settings.ranks
        """The tokens, of all ranks together, after which a state is saved."""

    # ---- from the API --------------------------------------------------------------------------

    def expect(self, request: Request) -> bool:
        """Fetch the state that a request begins with, once the model is known; true if its tokens may come then."""
        model, begin, keeping = self._requests.model, request.work.begin, request.keeping
        if model is None or not request.has_states:
            return not request.has_states
        if model.manifest is None or model.state_bytes is None:
            text = "sessions are not offered by this model: it has no state of a text that could be stored"
            self._requests.fail(request, Code.INVALID_VALUE, text)
            return False
        if begin is None or keeping.fetching or keeping.saved is not None:
            return True
        limit = largest_snapshot(model.state_bytes_at(begin.position), model.vocab_size)
        if not 0 < begin.num_bytes <= limit:
            text = (
                f"a state of {begin.num_bytes} bytes was announced; one of this model has up to {limit} at token "
                f"{begin.position}"
            )
            self._requests.fail(request, Code.INVALID_STATE, text)
            return False
        keeping.fetch()
        self._state_files.fetch(request.number, begin, limit, lambda header: self._begin(request.number, header))
        return True

    def finish_drawing(self, request: Request, drawn: int) -> None:
        """End a session's drawing after its first `drawn` tokens, or at its last saved state where that is further."""
        drawing = request.drawing
        request.reading.hear(self._requests.now)
        if not request.is_session or request.keeping.ranks_done or not drawing.finish_after(drawn):
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

    # ---- from and to the store -----------------------------------------------------------------

    def _begin(self, number: int, fetched: SnapshotHeader | Exception) -> None:
        """Begin the request with the state that is here now, if it belongs to this model."""
        request = self._requests.get(number)
        if request is None:
            self._state_files.drop(number)
            return
        try:
            if isinstance(fetched, Exception):
                raise fetched
            self._restore(request, fetched)
        except (DistAttnError, OSError) as error:
            self._requests.fail(request, _code_of(error), f"{error}")
        except Exception as error:  # no memory, or a bug of ours, which ends this request and not the engine
            log.exception("a state could not be begun with", request=request.request_id)
            self._requests.fail(request, Code.ENGINE_FAILED, f"the state to begin with could not be used: {error!r}")
        else:
            self._requests.grant(request)
            self.settle(request)

    def _restore(self, request: Request, header: SnapshotHeader) -> None:
        """Check the state that was fetched, and begin the request with it.

        Raises: WireError, StateMismatchError, OSError.
        """
        begin, model = request.work.begin, self._requests.model
        assert begin is not None and model is not None and model.manifest is not None
        require_same_model(header.manifest.model, model.manifest.model)
        if header.position != begin.position:
            raise WireError(f"the state stands at {header.position}, and {begin.position} was announced")
        report = report_restore(
            header.manifest.computed, model.manifest.computed, header.position, storage=header.storage
        )
        if not request.is_session and not report.bit_exact:
            raise StateMismatchError(f"a completion goes on only from a state that changes no bit: {report.reason}")
        if not self._state_files.begun(request.number):
            raise OSError("the state could not be kept on the controller's disk")
        request.keeping.keep(SavedState(request.number, header.position, 0, begin.num_bytes, snapshot=True))
        self._requests.post(request.peer, Restored(request.request_id, report))

    def _hand_out(self, request: Request) -> None:
        """Store the request's last saved state for the API, unless that was done before a loss."""
        saved, keeping = request.keeping.saved, request.keeping
        assert saved is not None
        if saved.position <= keeping.handed_out:
            return
        if not self._state_files.hold(request.number, saved.ordinal):
            if request.is_session:  # a completion does without it
                self._requests.fail(
                    request, Code.ENGINE_FAILED, "a state could not be written to the controller's disk"
                )
        elif keeping.hand_out(saved):
            self._store(request.number, saved)

    def _store(self, number: int, saved: SavedState) -> None:
        self._state_files.put(number, saved.ordinal, lambda stored: self._announce(number, stored))

    def _announce(self, number: int, stored: StoredBlob | Exception) -> None:
        """Tell the API of a state that is in the store, or that it could not be stored; then store the next one."""
        request = self._requests.get(number)
        if request is None:
            if isinstance(stored, StoredBlob):
                self._state_files.discard(stored.name)
            return
        keeping, error = request.keeping, ""
        saved, blob = keeping.stored(), ("", "", 0)
        if isinstance(stored, StoredBlob):
            blob = stored
        else:
            error = f"the state at {saved.position} was not stored: {stored}"
            log.warning(error, request=request.request_id)
            if not request.is_session:
                keeping.hand_out_no_more()
        self._requests.post(request.peer, Checkpoint(request.request_id, saved.position, saved.draws, *blob, error))
        if keeping.storing:
            self._store(number, keeping.storing[0])
        self.settle(request)

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
        return self._state_files.parts(number)

    # ---- from the ranks ------------------------------------------------------------------------

    def take_saved(self, saved: SavedState) -> None:
        """Take a state that a rank has sent whole; it counts once no other rank owes rows before its position."""
        request = self._requests.get(saved.request)
        if request is None:
            self._state_files.drop(saved.request)
            return
        saves = request.keeping.saves
        if not saves.awaits(saved.ordinal):
            return
        if self._state_files.finish(saved.request, saved.ordinal, saved.num_bytes):
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
            if self._state_files.commit(request.number, saved.ordinal):
                request.commit(saved)
                if request.hands_out(saved):
                    self._hand_out(request)
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
        elif request.work.keep.at:
            self._leave_ranks(request)
            self.settle(request)
        else:
            self._requests.remove(request, "done")

    def settle(self, request: Request) -> None:
        """End a request whose last state is here, once all that it is to hand out has been stored."""
        if self._requests.get(request.number) is None:
            return
        keeping = request.keeping
        if not request.is_session:
            if keeping.ranks_done and not keeping.saves.pending and not keeping.storing:
                self._requests.end(request)
            return
        if not request.is_at_its_end:
            return
        if not keeping.ranks_done:
            self._leave_ranks(request)
            self._hand_out(request)
            self._requests.post_rows(request, request.reading.last_rows())
        if not keeping.storing and self._requests.get(request.number) is not None:
            self._requests.end(request)

    def _leave_ranks(self, request: Request) -> None:
        if request.finish():
            self._requests.close(request.number)

    def ranks_lost(self) -> None:
        """Drop states that had not come whole; requests that only wait for such a state end."""
        self._state_files.forget_unfinished()
        for request in self._requests:
            # Also of one that the lost ranks no longer worked on: its place went to another as soon as an earlier state
            # of the same position was here.
            request.keeping.saves.clear()
            if request.keeping.ranks_done:
                self.settle(request)


def _code_of(error: Exception) -> Code:
    """The code of a request that cannot begin with its state."""
    match error:
        case StateMismatchError():
            return Code.STATE_MISMATCH
        case WireError():
            return Code.INVALID_STATE
        case StateDamagedError():
            return Code.STATE_DAMAGED
        case StorageError() | TimeoutError():
            return Code.STORAGE_FAILED
    return Code.ENGINE_FAILED
