"""What every message is made of."""

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Count", "Message", "Name"]

# What a decoded message may hold; a value outside is refused as a WireError before anybody counts with it.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every message: a frozen, tagged value; unknown fields are refused."""
