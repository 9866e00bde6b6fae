"""What a request says of itself beside its work: how urgent, until when of use, how long; and how far it has come."""

from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.wire.message import Count, Message, Name

__all__ = ["PRIORITIES", "Progress", "Terms"]

PRIORITIES = ("high", "normal", "low")
"""The classes, the most urgent first; a message carries the place in this list."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Units: seconds from when the message was sent; tokens of the input, None where that is not known yet.

    With `progress` the controller tells how far the input has been read.
    """

    priority: Annotated[int, Meta(ge=0, lt=len(PRIORITIES))] = 1
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    tokens: Count | None = None
    progress: bool = False


class Progress(Message, frozen=True):
    """The input has been read up to (not including) position `processed`; only where `Terms.progress` asks for it."""

    request_id: Name
    processed: Count
