"""Blobs: bytes that are written once as a stream, read as a stream, and deleted; their names say when they began."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator

from dist_attn.errors import StorageError

PIECE_BYTES = 1 << 20


class Blobs(ABC):
    """Blobs in one place."""

    @abstractmethod
    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Keep these bytes under a new name; durable and whole once this returns, and nothing is left if it raises.

        Raises: StorageError when they cannot be written, as on a full disk; whatever `pieces` raises.
        """

    @abstractmethod
    def read(self, name: str) -> AsyncIterator[bytes]:
        """The bytes of a blob, at most PIECE_BYTES at a time.

        Raises: StateDamagedError when it is not there, StorageError when it cannot be read.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a blob, if it is there."""

    @abstractmethod
    def names(self) -> AsyncIterator[str]:
        """The names of all blobs, and of what was left by writers that died."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the place; nothing is lost."""


def new_name(now: float) -> str:
    """A name that no other blob has; `now` in seconds since 1970."""
    return f"{int(now):010x}{secrets.token_hex(16)}"


def born_at(name: str) -> float:
    """When the blob of this name was begun, in seconds since 1970; 0 for a name that is not of ours."""
    try:
        return float(int(name[:10], 16))
    except ValueError:
        return 0.0


async def within(pieces: AsyncIterable[bytes], limit: int) -> AsyncIterator[bytes]:
    """The same bytes, in pieces that are not too large for any place.

    Raises: StorageError as soon as they are more than `limit`.
    """
    seen = 0
    async for piece in pieces:
        seen += len(piece)
        if seen > limit:
            raise StorageError(f"more than {limit} bytes came for one snapshot, which is the limit of this store")
        for at in range(0, len(piece), PIECE_BYTES):
            yield piece[at : at + PIECE_BYTES] if len(piece) > PIECE_BYTES else piece
