"""The typed messages between processes, and their one encoding (msgpack; nothing is unpickled).

Who speaks to whom:

    API  <-> controller : Open… / Tokens / Cancel / GetStatus   and   Accepted / Credit / Rows / … / Failed / Status
                          and, for sessions, what session_messages.py lists
    controller <-> rank : StatePart / Step / Shutdown / Ping
                          and RankHello / StatePart / Draws / StepDone / Heartbeat / RankFailed
    controller <-> agent: StartGroup / WatchRanks / KillGroup / StopAgent / Ping
                          and AgentHello / GroupStarted / RankExited / GroupExited

Token payloads are raw little-endian int32, vectors raw little-endian float32: a message is decoded
without copying numbers one by one, and its size is checked against the declared counts.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.errors import WireError
from dist_attn.wire.agent_messages import (
    AgentHello,
    GroupExited,
    GroupStarted,
    KillGroup,
    RankExited,
    StartGroup,
    StopAgent,
    WatchRanks,
)
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.message import Count, Message, Name
from dist_attn.wire.session_messages import (
    BeginState,
    Checkpoint,
    FinishDrawing,
    Restored,
    SessionDone,
    StateCredit,
    StatePiece,
)
from dist_attn.wire.specs import RowSpec as RowSpec
from dist_attn.wire.specs import SamplingSpec as SamplingSpec
from dist_attn.wire.specs import TokenLogprobs as TokenLogprobs
from dist_attn.wire.terms import Progress as Progress
from dist_attn.wire.terms import Terms

PROTOCOL_VERSION = 8
MAX_MESSAGE_BYTES = 64 << 20

# ---- API -> controller -------------------------------------------------------------------------


class OpenEncoding(Message, frozen=True):
    """Start an encoding; tokens follow in `Tokens` messages as far as `Credit` allows."""

    request_id: Name
    rows: RowSpec
    terms: Terms = Terms()


class OpenCompletion(Message, frozen=True):
    """Start a completion; prompt tokens follow in `Tokens` messages as far as `Credit` allows."""

    request_id: Name
    sampling: SamplingSpec
    terms: Terms = Terms()


class OpenSession(Message, frozen=True):
    """Go on with a session: from a stored state or the empty one, feed tokens, then draw some, and hand back the state.

    All positions of such a request count from the beginning of the session: its tokens begin at the state's position.
    `rows` and `sampling` may both be left out. States are handed back at the end, and at multiples of
    `checkpoint_tokens` (0: none before the end), which is rounded up to the grid of blocks.
    """

    request_id: Name
    begin: BeginState | None = None
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    checkpoint_tokens: Count = 0


class Tokens(Message, frozen=True):
    """Tokens [start, start + n) of a request, int32; `final` marks the end of its input."""

    request_id: Name
    start: Count
    tokens: bytes
    final: bool


class Cancel(Message, frozen=True):
    """Stop the request wherever it is: queued, prefilling or decoding."""

    request_id: Name


class GetStatus(Message, frozen=True):
    """Ask for one `Status`."""


# ---- controller -> API -------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """The request is admitted."""

    request_id: Name


class Credit(Message, frozen=True):
    """The API may send tokens of this request up to (not including) position `upto`."""

    request_id: Name
    upto: Count


class Rows(Message, frozen=True):
    """Complete rows [first_row, first_row + n) in order: token ranges and float32 vectors [n, dim]."""

    request_id: Name
    first_row: Count
    starts: list[int]
    stops: list[int]
    vectors: bytes


class EncodingDone(Message, frozen=True):
    """Every row has been sent."""

    request_id: Name
    tokens: Count
    rows: Count


class Generated(Message, frozen=True):
    """Newly drawn tokens; `finish_reason` ("stop" or "length") comes with the last ones.

    `logprobs` has one entry per token when the request asked for them.
    """

    request_id: Name
    tokens: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


class Failed(Message, frozen=True):
    """The request ended without its result.

    `code` is from the closed set of service.errors. The controller uses: overloaded (too much is open; there may be
    room in `retry_after_s` seconds), deadline_exceeded (its own deadline has passed),
    engine_failed (a rank was lost while it held this request), engine_not_ready (no engine in time, or it is stopping),
    invalid_value and empty_input (the request or its tokens), body_timeout (its tokens stopped coming).
    """

    request_id: Name
    code: str
    message: str
    retry_after_s: Annotated[int, Meta(ge=1)] | None = None


class GuardCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many denominators attention formed, and how many of them a policy replaced before dividing.

    `guarded` is per layer and head; a layer that forms no denominators has no heads.
    """

    denominators: Count = 0
    guarded: list[list[Count]] = []


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the controller sees it; ages in seconds."""

    rank: int
    pid: int
    phase: str
    step_done: int
    heartbeat_age: float
    progress_age: float
    peak_rss_bytes: int = 0


class Status(Message, frozen=True):
    """What the engine is doing now; `ready` is false with a `reason` in words."""

    ready: bool
    reason: str
    model: str
    hidden_size: int
    vocab_size: int
    backend: str
    epoch: int
    step: int
    queued: int
    active: int
    tokens_per_second: float
    ranks: list[RankStatus]
    guards: GuardCounts | None = None  # of all ranks since the controller started
    lost_groups: int = 0
    replayed_tokens: int = 0  # prefilled or drawn a second time after a loss
    manifest: Manifest | None = None  # of the states of sessions; None where they cannot be stored


# ---- controller -> rank ------------------------------------------------------------------------


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session's state after `position` tokens, `draws` tokens drawn; its bytes travel as `StatePart`.

    Those of completions do not hold the last drawn token yet: it is the next one to feed. `ordinal` is that of the
    `SaveOp`; `snapshot` says that the bytes are a snapshot's and not the bare numbers.
    """

    session: Count
    position: Count
    draws: Count
    num_bytes: Count
    ordinal: Count = 0
    snapshot: bool = False


class OpenOp(msgspec.Struct, frozen=True, tag="open"):
    """A session begins: every rank creates its empty state. `rows` for encodings, `sampling` for completions.

    With `restore` it goes on from a state whose parts have come before this step; `counts` says then how often each
    token was drawn and fed to that state, where penalties need it. `from_logits`: the logits after the last token are
    kept beside the state and drawn from, and what is drawn is fed at once, but for the end token; otherwise the last
    token of the prompt is fed by the first draw.
    """

    session: Count
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    restore: SavedState | None = None
    counts: dict[Count, Count] = {}
    from_logits: bool = False


class PrefillOp(msgspec.Struct, frozen=True, tag="prefill"):
    """Feed block [start, start + sum(lengths)) of a session, split over the ranks by `lengths`.

    `tokens` is this rank's slice only (int32). The state before `start` is equal on all ranks, and so
    is the state after the block.
    """

    session: Count
    start: Count
    lengths: list[Count]
    tokens: bytes


class DecodeEntry(msgspec.Struct, frozen=True):
    """One session in a decode batch; `token` is fed to it, the last prompt token first; None: the last drawn one.

    Of one that draws from kept logits, `token` is what this draw gave the first time; None: it is the first time.
    """

    session: Count
    token: Count | None = None


class DecodeOp(msgspec.Struct, frozen=True, tag="decode"):
    """Draw one token for each of these sessions; sent to the rank that owns them, no communication."""

    entries: list[DecodeEntry]


class CloseOp(msgspec.Struct, frozen=True, tag="close"):
    """Forget the session; an unknown one is ignored (a rank that does not own it has dropped it already)."""

    session: Count


class SaveOp(msgspec.Struct, frozen=True, tag="save"):
    """Send the session's state as it is now: its parts, and a `SavedState` in the `StepDone` of this step.

    As a `snapshot` it has a manifest and, where they are kept, the logits after its last token.
    """

    session: Count
    ordinal: Count = 0
    snapshot: bool = False


Op = OpenOp | PrefillOp | DecodeOp | CloseOp | SaveOp


class StatePart(Message, frozen=True):
    """Bytes [start, start + n) of a session's state, in order; to a rank before the step that restores it."""

    epoch: Count
    rank: Count  # which rank it comes from or goes to
    session: Count
    start: Count
    data: bytes
    ordinal: Count = 0  # of the SaveOp that asked for it


class Step(Message, frozen=True):
    """Step `k` of `epoch`: a rank performs `ops` in order; collective ops stand in the same order on all ranks.

    `rounds` are further rounds of decoding, which go between the layers of the step's blocks, evenly spread: the same
    number on every rank, so that ranks decode at the same time and none waits for another in an exchange.
    """

    epoch: Count
    k: Count
    ops: list[Op]
    rounds: list[DecodeOp] = msgspec.field(default_factory=list)


class Shutdown(Message, frozen=True):
    """The rank finishes and exits with code 0."""

    epoch: Count


class Ping(Message, frozen=True):
    """The controller's answer to every `Heartbeat` and `AgentHello`; who hears none for long exits by itself."""


# ---- rank -> controller ------------------------------------------------------------------------


class RankHello(Message, frozen=True):
    """First message of a rank: who it is and what it has loaded.

    `text_tokens` is how much of a text the model reads at once, as a sequence that stands alone; None: any length.
    `pauses` is how often work on a block can be interrupted for a round of decoding; 0: not at all.
    """

    protocol_version: int
    epoch: Count
    rank: Count
    size: Count
    pid: Count
    host: str
    model: str
    hidden_size: Count
    vocab_size: Count
    end_token: Count | None = None
    text_tokens: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    # Bytes of a session's state; None where it grows with the text and is not saved.
    state_bytes: Count | None = None
    # What the states of sessions say about themselves; None where they cannot be stored.
    manifest: Manifest | None = None
    pauses: Count = 0


class RowPieces(msgspec.Struct, frozen=True):
    """Sums (pooling mean), last vectors or the model's own over ranges of tokens, in order, float32 [n, dim].

    A range is a whole row or the part of a row that lies in this rank's slice of the block.
    """

    session: Count
    starts: list[Count]
    stops: list[Count]
    vectors: bytes


class Drawn(msgspec.Struct, frozen=True):
    """One token drawn for a session."""

    session: Count
    token: Count
    logprobs: TokenLogprobs | None = None


class SessionFault(msgspec.Struct, frozen=True):
    """One session cannot go on, for a reason that leaves the others and the rank as they were."""

    session: Count
    error: str
    code: str = "engine_failed"


class Draws(Message, frozen=True):
    """What one round of decoding in step `k` gave; sent at once where the step goes on with other work."""

    epoch: Count
    k: Count
    rank: Count
    drawn: list[Drawn]
    faults: list[SessionFault] = msgspec.field(default_factory=list)


class StepDone(Message, frozen=True):
    """The rank finished step `k`; its rows travel here, and drawn tokens that no `Draws` has brought.

    `decode_seconds` of the `seconds` went into rounds of decoding.
    """

    epoch: Count
    k: Count
    rank: Count
    seconds: float
    pieces: list[RowPieces]
    drawn: list[Drawn]
    faults: list[SessionFault] = msgspec.field(default_factory=list)
    guards: GuardCounts | None = None  # of this step, where attention formed denominators
    saved: list[SavedState] = msgspec.field(default_factory=list)
    decode_seconds: float = 0.0


class Heartbeat(Message, frozen=True):
    """Sent by the rank's heartbeat thread, which needs neither the GPU nor the main thread."""

    epoch: Count
    rank: Count
    step_done: Count
    phase: str
    time: float
    progress: Count = 0  # operations and layers finished since start: "slow" still moves, "stuck" does not
    peak_rss_bytes: Count = 0


class RankFailed(Message, frozen=True):
    """The rank met an exception in step `k`; it exits after this message."""

    epoch: Count
    rank: Count
    k: Count
    error: str


AnyMessage = (
    OpenEncoding
    | OpenCompletion
    | OpenSession
    | Tokens
    | Cancel
    | GetStatus
    | Accepted
    | Credit
    | Rows
    | EncodingDone
    | Generated
    | Progress
    | Failed
    | Status
    | StatePiece
    | StateCredit
    | FinishDrawing
    | Restored
    | Checkpoint
    | SessionDone
    | StatePart
    | Step
    | Shutdown
    | Ping
    | RankHello
    | Draws
    | StepDone
    | Heartbeat
    | RankFailed
    | StartGroup
    | WatchRanks
    | KillGroup
    | StopAgent
    | AgentHello
    | GroupStarted
    | RankExited
    | GroupExited
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The message as msgpack bytes.

    Raises: WireError if it is larger than MAX_MESSAGE_BYTES.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}; "
            "send it in parts"
        )
    return data


def decode(data: bytes) -> AnyMessage:
    """The message that `data` holds.

    Raises: WireError if it is too large, not msgpack, of an unknown type or with unknown fields.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"unreadable message: {error}") from None
