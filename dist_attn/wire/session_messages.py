"""The messages with which a session is gone on with: a stored state in, the states that came of it out.

    API -> controller : OpenSession (messages.py), StatePiece of the state to begin with, Tokens, FinishDrawing, Cancel,
                        StateCredit for the states that come back
    controller -> API : Accepted, StateCredit, Restored, Credit, Rows, Generated, Checkpoint and its StatePieces,
                        SessionDone or Failed

A stored state is a file of the format of snapshot.py. Its bytes travel in order, in pieces, as far as the receiver has
given credit. Positions count from the beginning of the session.
"""

import msgspec

from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.message import Count, Message, Name

__all__ = [
    "BeginState",
    "Checkpoint",
    "FinishDrawing",
    "Restored",
    "SessionDone",
    "StateCredit",
    "StatePiece",
]


class BeginState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored state that a request begins with: it stands after `position` tokens and has `num_bytes` bytes."""

    position: Count
    num_bytes: Count


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


class SessionDone(Message, frozen=True):
    """All is done: the session stands at `position`, after `drawn` drawn tokens; that state was the last Checkpoint."""

    request_id: Name
    position: Count
    drawn: Count
    rows: Count
