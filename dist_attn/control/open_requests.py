"""All open requests, and the messages to their API processes, which wait here while a process does not take them."""

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import final

import numpy as np
import structlog

from dist_attn.control.requests import Request
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateFiles
from dist_attn.model_config.figures import GRAIN
from dist_attn.rank_link.rows import RowBatch
from dist_attn.wire.messages import AnyMessage, Credit, Done, Failed, OpenWork, Rows
from dist_attn.wire.rank_messages import LoadedModel
from dist_attn.wire.sockets import Send, Sent

ROWS_MESSAGE_BYTES = 256 << 10
SUSPECT = 2  # losses after which it is worked on without others that are suspect too
# Far above what the steps under way can bring (64 MiB of rows come in 256 messages): only a peer that asks and asks
# without ever reading gets here.
MOST_WAITING = 8192

log = structlog.get_logger("dist_attn.control")


class Outboxes:
    """The waiting messages of each peer whose queue is full.

    An outbox holds what is already under way for its peer, because nothing new is started for a blocked one, and
    MOST_WAITING messages at most.
    """

    def __init__(self, send: Send, deadline_s: float) -> None:
        self._send = send
        self._deadline_s = deadline_s
        self._waiting: dict[bytes, deque[AnyMessage]] = {}
        self._stuck_since: dict[bytes, float] = {}

    def post(self, peer: bytes, message: AnyMessage, now: float) -> Sent:
        """Send the message, after those that wait: DONE, FULL when it waits too, GONE when the peer is not there.

        A peer whose outbox is full counts as gone too.
        """
        waiting = self._waiting.get(peer)
        if waiting is not None and len(waiting) >= MOST_WAITING:
            return Sent.GONE
        sent = self._send(peer, message) if waiting is None else Sent.FULL
        if sent is Sent.FULL:
            self._waiting.setdefault(peer, deque()).append(message)
            self._stuck_since.setdefault(peer, now)
        return sent

    def blocked(self, peer: bytes) -> bool:
        """Return whether messages wait for this peer."""
        return peer in self._waiting

    def flush(self, now: float) -> list[bytes]:
        """Send what waits; returns the peers, now without messages, that are gone or took nothing for `deadline_s`."""
        gone = []
        for peer, waiting in list(self._waiting.items()):
            sent = Sent.DONE
            while waiting and sent is Sent.DONE:
                sent = self._send(peer, waiting[0])
                if sent is Sent.DONE:
                    waiting.popleft()
                    self._stuck_since[peer] = now
            if sent is Sent.GONE or now - self._stuck_since[peer] > self._deadline_s:
                gone.append(peer)
            if not waiting or peer in gone:
                del self._waiting[peer], self._stuck_since[peer]
        return gone


@final
class OpenRequests:
    """Open requests by number, in order of arrival; `send` is that of their API processes.

    `state_files` holds the bytes of their states.
    """

    def __init__(self, settings: ControlSettings, send: Send, state_files: StateFiles) -> None:
        self._settings = settings
        self._outboxes = Outboxes(send, settings.reader_deadline_s)
        self._state_files = state_files
        self._numbers = count(1)
        self._requests: dict[int, Request] = {}
        self._by_id: dict[tuple[bytes, str], Request] = {}
        self._to_close: list[int] = []
        self.now = 0.0
        self.model: LoadedModel | None = None
        """The model that the ranks have loaded, once it is known."""

    @property
    def chunk(self) -> int:
        """Tokens of a block, all ranks together; those of a CPU while it is not known what the ranks compute on."""
        of_device = self.model.chunk_tokens if self.model else None
        return self._settings.ranks * (self._settings.chunk_tokens or of_device or GRAIN)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all open requests; any may end meanwhile."""
        return iter(list(self._requests.values()))

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def get(self, number: int) -> Request | None:
        """The request of that number, if it is open."""
        return self._requests.get(number)

    def find(self, peer: bytes, request_id: str) -> Request | None:
        """The open request of an API process that has this id there."""
        return self._by_id.get((peer, request_id))

    def make(self, peer: bytes, work: OpenWork) -> Request:
        """Make a new request, which is not open yet."""
        return Request.opened_by(work, next(self._numbers), peer, self.now, self.chunk)

    def add(self, request: Request) -> None:
        """Open a request."""
        self._requests[request.number] = self._by_id[request.peer, request.request_id] = request

    # ---- what the ranks hold -------------------------------------------------------------------

    @property
    def any_to_close(self) -> bool:
        """Return whether the ranks still hold the state of a request that has ended."""
        return bool(self._to_close)

    def close(self, number: int) -> None:
        """Let the ranks forget a request with the next step."""
        self._to_close.append(number)

    def take_closed(self) -> list[int]:
        """Take the numbers of the requests that the ranks are to forget now."""
        closed, self._to_close = self._to_close, []
        return closed

    # ---- to the API ----------------------------------------------------------------------------

    def post(self, peer: bytes, message: AnyMessage) -> None:
        """Send to an API process; if it is gone, its requests end."""
        if self._outboxes.post(peer, message, self.now) is Sent.GONE:
            self._drop(peer)

    def post_rows(self, request: Request, batches: list[RowBatch]) -> None:
        """Send complete rows, in messages that stay small."""
        if not batches:
            return
        starts = np.concatenate([batch.starts for batch in batches])
        stops = np.concatenate([batch.stops for batch in batches])
        vectors = np.concatenate([batch.vectors for batch in batches]).astype("<f4", copy=False)
        per_message = max(1, ROWS_MESSAGE_BYTES // (4 * max(1, vectors.shape[1])))
        for at in range(0, len(starts), per_message):
            part = slice(at, at + per_message)
            ranges = starts[part].tolist(), stops[part].tolist()
            rows = Rows(request.request_id, batches[0].first_row + at, *ranges, vectors[part].tobytes())
            self.post(request.peer, rows)

    def grant(self, request: Request) -> None:
        """Let the API send more tokens once a good part of what it may send has been used."""
        reading = request.reading
        # A sequence is read whole, so there must always be credit for one.
        whole = (self.model and self.model.text_tokens) or 0
        block = max(self._settings.ranks * self._settings.block_tokens, self.chunk)
        upto = reading.dispatched + max(self._settings.blocks_of_credit * block, whole)
        short = reading.credit - reading.dispatched < whole
        worth_it = short or upto - reading.credit >= min(block, upto)
        if request.is_restored and not reading.final and worth_it:
            reading.grant(upto, self.now)
            self.post(request.peer, Credit(request.request_id, upto))

    def probe(self) -> None:
        """See whether the API processes of waiting requests are still there, by a credit that says nothing new."""
        waiting = {request.peer: request for request in self if not request.reading.final}
        for request in waiting.values():
            if not self.blocked(request):
                self.post(request.peer, Credit(request.request_id, request.reading.credit))

    def flush(self) -> None:
        """Send what waits; the requests of API processes that take nothing, or are gone, end."""
        for peer in self._outboxes.flush(self.now):
            self._drop(peer)

    # ---- the end -------------------------------------------------------------------------------

    def fail(self, request: Request, code: str, text: str) -> None:
        """End a request without its result."""
        self.post(request.peer, Failed(request.request_id, code, text))
        self.remove(request, code)

    def end(self, request: Request) -> None:
        """End a request of which everything has been sent."""
        drawn, reading = request.drawing.sent, request.reading
        self.post(request.peer, Done(request.request_id, reading.received + drawn, drawn, reading.rows_sent))
        self.remove(request, "done")

    def remove(self, request: Request, outcome: str) -> None:
        """End a request; does nothing where it has ended."""
        if self._requests.pop(request.number, None) is None:
            return
        del self._by_id[request.peer, request.request_id]
        self._state_files.drop(request.number)
        if request.keeping.close():
            self.close(request.number)
        log.info(
            "request ended",
            request=request.request_id,
            kind=request.work.kind,
            outcome=outcome,
            tokens=request.reading.received,
            rows=request.reading.rows_sent,
            drawn=request.drawing.sent,
            seconds=round(self.now - request.created_at, 3),
        )

    def _drop(self, peer: bytes) -> None:
        for request in self:
            if request.peer == peer:
                self.remove(request, "reader gone")

    # ---- whose turn it is ----------------------------------------------------------------------

    def blocked(self, request: Request) -> bool:
        """Return whether its API process does not take what is sent, or another suspect request is tried first."""
        return self._outboxes.blocked(request.peer) or self._waits_as_suspect(request)

    def _waits_as_suspect(self, request: Request) -> bool:
        """Return whether another request that may have killed the ranks goes first: one at a time shows which does."""
        if request.losses.count < SUSPECT:
            return False
        return request is not next(r for r in self._requests.values() if r.losses.count >= SUSPECT)
