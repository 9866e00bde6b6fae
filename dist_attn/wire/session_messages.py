"""The messages with which stored states travel: in, for work that goes on from one, and out, as it comes to them.

    API -> controller : OpenSession, StatePiece of the state to begin with, Tokens, FinishDrawing, Cancel,
                        StateCredit for the states that come back
    controller -> API : Accepted, StateCredit, Restored, Credit, Rows, Generated, Checkpoint and its StatePieces,
                        SessionDone or Failed

Completions use the same pieces and credits: for the state of a prompt's beginning, and for those of their prompts.

A stored state is a file of the format of snapshot.py. Its bytes travel in order, in pieces, as far as the receiver has
given credit. Positions count from the beginning of the session.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.message import Count, Message, Name
from dist_attn.wire.specs import RowSpec, SamplingSpec
from dist_attn.wire.terms import Terms

__all__ = [
    "BeginState",
    "Checkpoint",
    "FinishDrawing",
    "Keep",
    "OpenSession",
    "OpenWork",
    "Restored",
    "SessionDone",
    "StateCredit",
    "StatePiece",
    "StatesDone",
]


class BeginState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored state that a request begins with: it stands after `position` tokens and has `num_bytes` bytes."""

    position: Count
    num_bytes: Count


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which stored states are handed out: at multiples of `every` tokens (0: none), which is rounded up to the grid of
    blocks; at the positions `at` of a prompt, which are on the grid; and at the `end`.
    """

    every: Count = 0
    at: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    end: bool = False


class OpenWork(Message, frozen=True):
    """Open a request: from a stored state or the empty one, read tokens, of which `rows` asks for vectors, then `draw`.

    The tokens follow in `Tokens` messages as far as `Credit` allows; with `begin` the state comes first, and positions
    count from the beginning of its text. What is kept at the `end` is a session: it stands after all drawn tokens.
    States of a prompt (`keep.at`) may be fetched after the last drawn token too, and `StatesDone` says that there are
    no more; one that could not be kept is left out.
    """

    request_id: Name
    begin: BeginState | None = None
    rows: RowSpec | None = None
    draw: SamplingSpec | None = None
    keep: Keep = Keep()
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
    terms: Terms = Terms()


class StatePiece(Message, frozen=True):
    """Bytes [start, start + n) of the stored state at `position`."""

    request_id: Name
    position: Count
    start: Count
    data: bytes


class StateCredit(Message, frozen=True):
    """The receiver of the stored state at `position` takes its bytes up to (not including) `upto`."""

    request_id: Name
    position: Count
    upto: Count


class FinishDrawing(Message, frozen=True):
    """Draw no further: the session shall stand after the first `drawn` drawn tokens, as if no more had been asked."""

    request_id: Name
    drawn: Count


class Restored(Message, frozen=True):
    """The state to begin with belongs to this model; what going on from it comes to."""

    request_id: Name
    report: RestoreReport


class Checkpoint(Message, frozen=True):
    """The state after `position` tokens, `drawn` of which this request has drawn, can be fetched by credit.

    The next one is announced when all bytes of this one have been sent.
    """

    request_id: Name
    position: Count
    drawn: Count
    num_bytes: Count


class StatesDone(Message, frozen=True):
    """A completion has ended, and all of its states that could be kept have been handed out."""

    request_id: Name


class SessionDone(Message, frozen=True):
    """All is done: the session stands at `position`, after `drawn` drawn tokens; that state was the last Checkpoint."""

    request_id: Name
    position: Count
    drawn: Count
    rows: Count
