"""The two ports under all that the store knows: ordered records that change in transactions, and blobs that stream.

Each place offers reading records, a range in key order, and writing a set of changes at once; `BufferedTransaction`
makes transactions of that, which see their own changes. The work of a transaction may run again when another one was
faster, so it does nothing but read and write records. Blobs are written once, read and deleted; their names say when
they began.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar, final

from dist_attn.errors import StorageError

T = TypeVar("T")
PIECE_BYTES = 1 << 20


class RecordView(ABC):
    """The records as they stand while a transaction runs."""

    @abstractmethod
    async def read(self, keys: list[str]) -> list[bytes | None]:
        """The values of these keys, None where there is none."""

    @abstractmethod
    async def range(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        """The first `limit` records whose keys begin with `prefix` and come after `after`, in order."""


class Records(ABC):
    """The records in one place."""

    @abstractmethod
    async def transact(self, work: "Callable[[BufferedTransaction], Awaitable[T]]") -> T:
        """Run `work` and return its result; all its changes are there afterwards, durably, or none.

        Raises: StorageError when the place cannot be read or written to; whatever `work` raises. Then nothing changes.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the place; nothing is lost."""


@final
class BufferedTransaction:
    """A transaction that reads through to a view, and keeps its changes until they are written together."""

    def __init__(self, view: RecordView) -> None:
        self._view = view
        self.changes: dict[str, bytes | None] = {}
        """New values by key; None stands for a deleted one."""

    async def get(self, key: str) -> bytes | None:
        """Read the value of a key, with this transaction's own changes."""
        (value,) = await self.get_many([key])
        return value

    async def get_many(self, keys: Iterable[str]) -> list[bytes | None]:
        """Read the values of many keys, as `get` does."""
        wanted = list(keys)
        unchanged = [key for key in wanted if key not in self.changes]
        found = dict(zip(unchanged, await self._view.read(unchanged), strict=True)) if unchanged else {}
        return [self.changes[key] if key in self.changes else found[key] for key in wanted]

    async def scan(self, prefix: str, limit: int, after: str = "") -> list[tuple[str, bytes]]:
        """The first `limit` records whose keys begin with `prefix` and come after the key `after`, in order."""
        own = {key: value for key, value in self.changes.items() if key.startswith(prefix) and key > after}
        # Reads beyond `limit` by as many records as this transaction may have deleted.
        stored = await self._view.range(prefix, after, limit + len(own))
        merged = {key: value for key, value in stored if key not in own}
        merged |= {key: value for key, value in own.items() if value is not None}
        return sorted(merged.items())[:limit]

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""
        self.changes[key] = value

    def delete(self, key: str) -> None:
        """Remove a record, if it is there."""
        self.changes[key] = None


class Blobs(ABC):
    """The blobs in one place."""

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
    async def has(self, name: str) -> bool:
        """Return whether a blob is there. Raises: StorageError when that cannot be seen."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a blob, if it is there."""

    @abstractmethod
    def names(self) -> AsyncIterator[str]:
        """The names of all blobs, and of what was left by writers that died."""

    @abstractmethod
    async def place(self) -> str:
        """The random name of the place, by which processes see that it is the same; drawn when first asked for.

        Raises: StorageError when it can be neither read nor written.
        """

    async def owner(self, records: str) -> str:
        """The name of the records whose blobs these are: those that were first opened over them, where that is kept.

        Raises: StorageError.
        """
        return records

    @abstractmethod
    async def close(self) -> None:
        """Let go of the place; nothing is lost."""


def new_name(now: float) -> str:
    """Make a name that no other blob has; `now` in seconds since 1970."""
    return f"{int(now):010x}{secrets.token_hex(16)}"


def born_at(name: str) -> float:
    """The time when the blob of this name was begun, in seconds since 1970; 0 for a name that is not one of ours."""
    try:
        return float(int(name[:10], 16))
    except ValueError:
        return 0.0


async def within(pieces: AsyncIterable[bytes], limit: int) -> AsyncIterator[bytes]:
    """Pass on bytes, in pieces that are not too large for any place.

    Raises: StorageError as soon as they are more than `limit`.
    """
    seen = 0
    async for piece in pieces:
        seen += len(piece)
        if seen > limit:
            raise StorageError(f"more than {limit} bytes came for one snapshot, which is the limit of this store")
        for at in range(0, len(piece), PIECE_BYTES):
            yield piece[at : at + PIECE_BYTES] if len(piece) > PIECE_BYTES else piece
