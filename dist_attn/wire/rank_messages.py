"""The messages between the controller and the ranks: numbered steps of operations, and their results.

controller -> rank : StatePart / Step / GoOn / Shutdown / Ping
rank -> controller : RankHello / StatePart / Draws / Faulted / StepDone / Heartbeat / RankFailed
"""

from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.wire.manifest import Manifest
from dist_attn.wire.specs import MOST_END_TOKENS, Count, Message, RowSpec, SamplingSpec, TokenLogprobs
from dist_attn_api.errors import Code

# ---- controller -> rank ------------------------------------------------------------------------


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's state after `position` tokens, `draws` tokens drawn; its bytes travel as `StatePart`.

    Those of completions do not hold the last drawn token yet: it is the next one to feed. `ordinal` is that of the
    `SaveOp`; `snapshot` says that the bytes are a snapshot's and not the bare numbers.
    """

    request: Count
    position: Count
    draws: Count
    num_bytes: Count
    ordinal: Count = 0
    snapshot: bool = False


class OpenOp(msgspec.Struct, frozen=True, tag="open"):
    """A request begins: the rank creates its empty state. `rows` for encodings, `sampling` for completions.

    With `restore` it goes on from a state whose parts have come before this step; `counts` says then how often each
    token was drawn and fed to that state, where penalties need it; `drawn` are these tokens in order (int32), where a
    grammar needs them. `from_logits`: the logits after the last token are kept beside the state and drawn from, and
    what is drawn is fed at once, but for the end token; otherwise the last token of the prompt is fed by the first
    draw.
    """

    request: Count
    rows: RowSpec | None = None
    sampling: SamplingSpec | None = None
    restore: SavedState | None = None
    counts: dict[Count, Count] = {}
    from_logits: bool = False
    drawn: bytes = b""


class PrefillOp(msgspec.Struct, frozen=True, tag="prefill"):
    """Feed block [start, start + sum(lengths)) of a request, split over the ranks by `lengths`.

    `tokens` is this rank's slice only (int32, with the marks that they came with). The states before and after the
    block are equal on all ranks, but for the keys of an encoding, of which each rank keeps a part. `following` is the
    token after the slice, where the tokens of a prompt are scored.
    """

    request: Count
    start: Count
    lengths: list[Count]
    tokens: bytes
    following: Count | None = None


class DecodeEntry(msgspec.Struct, frozen=True):
    """One request in a decode batch; `token` is fed to it, the last prompt token first; None: the last drawn one.

    Of one that draws from kept logits, `token` is what this draw gave the first time; None: it is the first time.
    """

    request: Count
    token: Count | None = None


class DecodeOp(msgspec.Struct, frozen=True, tag="decode"):
    """Draw one token for each of these requests; sent to the rank that owns them, which needs no other rank.

    Where weights lie over ranks it goes to every rank, and all take part.
    """

    entries: list[DecodeEntry]


class CloseOp(msgspec.Struct, frozen=True, tag="close"):
    """Forget the request; an unknown one is ignored (a rank that does not own it has dropped it already)."""

    request: Count


class SaveOp(msgspec.Struct, frozen=True, tag="save"):
    """Send the request's state as it is now: its parts, and a `SavedState` in the `StepDone` of this step.

    As a `snapshot` it has a manifest and, where they are kept, the logits after its last token.
    """

    request: Count
    ordinal: Count = 0
    snapshot: bool = False


Op = OpenOp | PrefillOp | DecodeOp | CloseOp | SaveOp


STATE_PART_BYTES = 4 << 20


class StatePart(Message, frozen=True):
    """Bytes [start, start + n) of a request's state, in order; to a rank before the step that restores it."""

    epoch: Count
    rank: Count  # which rank it comes from or goes to
    request: Count
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


class GoOn(Message, frozen=True):
    """All ranks have met the same fault of a request in step `k`: each leaves out the rest of that request."""

    epoch: Count
    k: Count
    request: Count


class Shutdown(Message, frozen=True):
    """The rank finishes and exits with code 0."""

    epoch: Count


class Ping(Message, frozen=True):
    """The controller's answer to every `Heartbeat` and `AgentHello`; who hears none for long exits by itself."""


# ---- rank -> controller ------------------------------------------------------------------------


class GuardCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of denominators that attention formed, and how many of them a policy replaced before dividing.

    `guarded` is per layer and head; a layer that forms no denominators has no heads.
    """

    denominators: Count = 0
    guarded: list[list[Count]] = []

    def plus(self, other: "GuardCounts") -> "GuardCounts":
        """Add two counts, layer by layer and head by head."""
        nothing: list[int] = []
        guarded = [
            [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]
            for ours, theirs in zip_longest(self.guarded, other.guarded, fillvalue=nothing)
        ]
        return GuardCounts(self.denominators + other.denominators, guarded)


class LoadedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts about the model that a rank has loaded.

    `text_tokens` is how much of a text the model reads at once, as a sequence that stands alone; None: any length.
    `positions` is how many tokens a text may have with what is drawn after it, where it learned a vector for each.
    `writes`: more than vectors.
    `pauses` is how often work on a block can be interrupted for a round of decoding; 0: not at all.
    `chunk_tokens` of each rank make a block, unless the settings say otherwise; None: those of a CPU.
    """

    name: str
    hidden_size: Count
    vocab_size: Count
    end_tokens: Annotated[tuple[Count, ...], Meta(max_length=MOST_END_TOKENS)] = ()  # each of them ends a text
    text_tokens: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    # Bytes of a request's state before any token; None where it is not saved.
    state_bytes: Count | None = None
    # The identity that stored states carry; None where states cannot be stored.
    manifest: Manifest | None = None
    token_bytes: Count = 0  # that a token adds to a state at most; 0: it has one size
    pauses: Count = 0
    # The choices that "auto" has become: the back end between ranks, and the device with its precision.
    backend: str = ""
    device: str = ""
    writes: bool = True
    positions: Annotated[int, Meta(ge=1)] | None = None
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None

    def state_bytes_at(self, position: int) -> int:
        """The most bytes of a state after `position` tokens."""
        return (self.state_bytes or 0) + self.token_bytes * position


class RankHello(Message, frozen=True):
    """First message of a rank: its number, its process and its model."""

    protocol_version: int
    epoch: Count
    rank: Count
    size: Count
    pid: Count
    model: LoadedModel


class RowPieces(msgspec.Struct, frozen=True):
    """Sums (pooling mean), last vectors or the model's own over ranges of tokens, in order, float32 [n, dim].

    A range is a whole row or the part of a row that lies in this rank's slice of the block. Of a completion there is a
    row for each token, about the one that follows it: see `rank_link.rows.score_width`. `ends` are those of `stops` at
    which a marked row ends.
    """

    request: Count
    starts: list[Count]
    stops: list[Count]
    vectors: bytes
    ends: list[Count] = []


class Drawn(msgspec.Struct, frozen=True):
    """One token drawn for a request."""

    request: Count
    token: Count
    logprobs: TokenLogprobs | None = None


class RequestFault(msgspec.Struct, frozen=True):
    """One request cannot go on, for a reason that leaves the others and the rank as they were."""

    request: Count
    error: str
    code: str = Code.ENGINE_FAILED


class Draws(Message, frozen=True):
    """The tokens of one round of decoding in step `k`; sent at once where the step goes on with other work."""

    epoch: Count
    k: Count
    rank: Count
    drawn: list[Drawn]
    faults: list[RequestFault] = msgspec.field(default_factory=list)


class Faulted(Message, frozen=True):
    """In step `k` an operation of all ranks raised an exception on this one, after so many `exchanges` of its own.

    The rank exchanges nothing more before a `GoOn` says that all of them stand there.
    """

    epoch: Count
    k: Count
    rank: Count
    fault: RequestFault
    exchanges: Count


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
    faults: list[RequestFault] = msgspec.field(default_factory=list)
    guards: GuardCounts | None = None  # of this step, where attention formed denominators
    saved: list[SavedState] = msgspec.field(default_factory=list)
    decode_seconds: float = 0.0


class Heartbeat(Message, frozen=True):
    """Sent by the rank's heartbeat thread, which needs neither the GPU nor the main thread."""

    epoch: Count
    rank: Count
    step_done: Count
    phase: str
    progress: Count = 0  # operations and layers finished since start: "slow" still moves, "stuck" does not
    peak_rss_bytes: Count = 0


class RankFailed(Message, frozen=True):
    """The rank met an exception in step `k`; it exits after this message."""

    epoch: Count
    rank: Count
    k: Count
    error: str


ToRank = StatePart | Step | GoOn | Shutdown | Ping
FromRank = RankHello | StatePart | Draws | Faulted | StepDone | Heartbeat | RankFailed
