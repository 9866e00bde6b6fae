"""Ordered records that change in transactions: the one interface under all that the store knows.

Each place offers reading, a range in key order, and writing a set of changes at once; `BufferedTransaction` makes
transactions of that, which see their own changes. The work of a transaction may run again when somebody else was
faster, so it does nothing but read and write records.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar, final

T = TypeVar("T")


class RecordView(ABC):
    """The records as they stand while a transaction runs."""

    @abstractmethod
    async def read(self, keys: list[str]) -> list[bytes | None]:
        """The values of these keys, None where there is none."""

    @abstractmethod
    async def range(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        """The first `limit` records whose keys begin with `prefix` and come after `after`, in order."""


class Records(ABC):
    """Records in one place."""

    @abstractmethod
    async def transact(self, work: "Callable[[BufferedTransaction], Awaitable[T]]") -> T:
        """What `work` returns; all its changes are there afterwards, durably, or none.

        Raises: StorageError when the place cannot be read or written to; whatever `work` raises. Then nothing changes.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the place; nothing is lost."""


@final
class BufferedTransaction:
    """Reads through to a view, and keeps its changes until they are written together."""

    def __init__(self, view: RecordView) -> None:
        self._view = view
        self.changes: dict[str, bytes | None] = {}
        """New values by key; None: deleted."""

    async def get(self, key: str) -> bytes | None:
        """The value of a key, with this transaction's own changes."""
        (value,) = await self.get_many([key])
        return value

    async def get_many(self, keys: Iterable[str]) -> list[bytes | None]:
        """`get` for many keys."""
        wanted = list(keys)
        unchanged = [key for key in wanted if key not in self.changes]
        found = dict(zip(unchanged, await self._view.read(unchanged), strict=True)) if unchanged else {}
        return [self.changes[key] if key in self.changes else found[key] for key in wanted]

    async def scan(self, prefix: str, limit: int, after: str = "") -> list[tuple[str, bytes]]:
        """The first `limit` records whose keys begin with `prefix` and come after the key `after`, in order."""
        own = {key: value for key, value in self.changes.items() if key.startswith(prefix) and key > after}
        # As many more as this transaction may have deleted of them.
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
