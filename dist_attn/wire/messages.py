"""The typed messages between processes, and their one encoding (msgpack; nothing is unpickled).

Who speaks to whom:

    API -> controller   : OpenWork, Tokens, FinishDrawing, Cancel; GetStatus
    controller -> API   : Accepted, Restored, Credit, Progress, Rows, Generated, Checkpoint, Done or Failed; Status
    controller <-> rank : what rank_messages.py lists
    controller <-> agent: what agent_messages.py lists

Token payloads are raw little-endian int32, vectors raw little-endian float32: a message is decoded
without copying numbers one by one, and its size is checked against the declared counts. A stored state is a file of the
format of snapshot.py, in the store that API and controller share: messages carry the name of its blob, its SHA-256 in
hex and its size.
"""

import zlib
from typing import Annotated, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta

from dist_attn.errors import WireError
from dist_attn.wire.agent_messages import FromAgent, ToAgent
from dist_attn.wire.manifest import Manifest, RestoreReport
from dist_attn.wire.rank_messages import FromRank, GuardCounts, ToRank
from dist_attn.wire.specs import Count, Message, Name, Terms
from dist_attn.wire.specs import Progress as Progress
from dist_attn.wire.specs import RowSpec as RowSpec
from dist_attn.wire.specs import SamplingSpec as SamplingSpec
from dist_attn.wire.specs import TokenLogprobs as TokenLogprobs

PROTOCOL_REVISION = 12  # raised where a message comes to mean something else with the same fields
MAX_MESSAGE_BYTES = 64 << 20

# ---- API -> controller -------------------------------------------------------------------------


Hex = Annotated[str, Meta(pattern="^[0-9a-f]*$", max_length=64)]


class BeginState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored state that a request begins with: it stands after `position` tokens, and its bytes are a blob."""

    position: Count
    blob: Hex
    digest: Hex
    num_bytes: Count


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored states that are handed out: at multiples of `every` tokens (0: none), rounded up to the grid of
    blocks; at the positions `at` of a prompt, which are on the grid; and at the `end`.
    """

    every: Count = 0
    at: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    end: bool = False


class OpenWork(Message, frozen=True):
    """Open a request: from a stored state or the empty one, read tokens, of which `rows` asks for vectors, then `draw`.

    The tokens follow in `Tokens` messages as far as `Credit` allows; with `begin` the state is read first, and
    positions count from the beginning of its text. What is kept at the `end` is a session: it stands after all drawn
    tokens. States of a prompt (`keep.at`) may come after the last drawn token too, and `Done` says that there are no
    more.
    """

    request_id: Name
    begin: BeginState | None = None
    rows: RowSpec | None = None
    draw: SamplingSpec | None = None
    keep: Keep = Keep()
    terms: Terms = Terms()

    @property
    def kind(self) -> Literal["encoding", "completion", "session"]:
        """The name of the work in logs and traces; only a session has rows and draws in one request."""
        if self.keep.end:
            return "session"
        return "encoding" if self.draw is None else "completion"


class Tokens(Message, frozen=True):
    """Tokens [start, start + n) of a request, int32; `final` marks the end of its input.

    Where `RowSpec.marked`, the last token of each row but the last one travels as ~token.
    """

    request_id: Name
    start: Count
    tokens: bytes
    final: bool


class Cancel(Message, frozen=True):
    """Stop the request wherever it is: queued, prefilling or decoding."""

    request_id: Name


class FinishDrawing(Message, frozen=True):
    """Draw no further: the session shall stand after the first `drawn` drawn tokens, as if no more had been asked."""

    request_id: Name
    drawn: Count


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
    """Complete rows [first_row, first_row + n) in order: token ranges and float32 vectors [n, dim].

    Of a completion whose prompt is scored, row i is about token i + 1 of the prompt: its log-probability, the ids of
    the likeliest tokens there, and their log-probabilities. All of them come before the first drawn token.
    """

    request_id: Name
    first_row: Count
    starts: list[int]
    stops: list[int]
    vectors: bytes


class Generated(Message, frozen=True):
    """Newly drawn tokens; `finish_reason` ("stop" or "length") comes with the last ones.

    `logprobs` has one entry per token when the request asked for them; where the prompt is scored too, one more for
    `end_token`, which ended the text.
    """

    request_id: Name
    tokens: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    end_token: Count | None = None


class Restored(Message, frozen=True):
    """The state to begin with belongs to this model; what going on from it comes to."""

    request_id: Name
    report: RestoreReport


class Checkpoint(Message, frozen=True):
    """The state after `position` tokens, `drawn` of which this request has drawn, lies in the store, durably.

    The API records it as a caller's, or deletes it. Where it could not be written, `error` says why.
    """

    request_id: Name
    position: Count
    drawn: Count
    blob: Hex = ""
    digest: Hex = ""
    num_bytes: Count = 0
    error: str = ""


class Done(Message, frozen=True):
    """The request stands at `position`, after `drawn` drawn tokens, and all of its rows and states have been sent.

    It follows an encoding's last row, a session's last `Checkpoint`, which stands there, and the states of a prompt
    (`keep.at`); other completions end with `Generated.finish_reason`.
    """

    request_id: Name
    position: Count
    drawn: Count
    rows: Count


class Failed(Message, frozen=True):
    """The request ended without its result.

    `code` is one of dist_attn_api/errors.py; with overloaded there may be room in `retry_after_s` seconds.
    """

    request_id: Name
    code: str
    message: str
    retry_after_s: Annotated[int, Meta(ge=1)] | None = None


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the controller sees it. Units: seconds; `busy` is what its steps have taken."""

    rank: int
    pid: int
    phase: str
    step_done: int
    heartbeat_age: float
    progress_age: float
    peak_rss_bytes: int = 0
    busy: float = 0.0
    device: str = ""


class Status(Message, frozen=True):
    """The present state of the engine; `ready` is false with a `reason` in words."""

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
    store: Hex = ""  # the name of the place of their blobs, once it is known
    state_bytes: Count | None = None  # of one text before any token, and what each token adds at most
    token_bytes: Count = 0


FromApi = OpenWork | Tokens | Cancel | GetStatus | FinishDrawing
ToApi = Accepted | Credit | Rows | Generated | Progress | Restored | Checkpoint | Done | Failed | Status
AnyMessage = FromApi | ToApi | FromRank | ToRank | FromAgent | ToAgent

PROTOCOL_VERSION = zlib.crc32(f"{PROTOCOL_REVISION} {msgspec.inspect.type_info(AnyMessage)}".encode())
"""The version of the messages, which changes with any field; processes of different versions do not work together."""


class _Addressed(msgspec.Struct):
    """The request that an undecodable message is about."""

    request_id: Name = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_addressed = msgspec.msgpack.Decoder(_Addressed)


def encode(message: AnyMessage) -> bytes:
    """Encode a message as msgpack bytes.

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
    """Decode the message that `data` holds.

    Raises: WireError if it is too large, not msgpack, of an unknown type or with unknown fields; it names the request
        that the message is about, where that much can be read.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        unreadable = WireError(f"unreadable message: {error}")
        unreadable.request_id = _request_of(data)
        raise unreadable from None


def _request_of(data: bytes) -> str:
    try:
        return _addressed.decode(data).request_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
