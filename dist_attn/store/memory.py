"""The store in memory: for tests and for services that may forget; it keeps every promise but that of durability."""

import asyncio
import secrets
from bisect import bisect_right, insort
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TypeVar, final

from dist_attn.errors import StateDamagedError
from dist_attn.store.ports import PIECE_BYTES, Blobs, BufferedTransaction, Records, RecordView

T = TypeVar("T")


@final
class MemoryRecords(Records):
    """The records as a dictionary with its keys in order."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._keys: list[str] = []
        self._lock = asyncio.Lock()

    async def transact(self, work: Callable[[BufferedTransaction], Awaitable[T]]) -> T:
        """Run the work, one transaction at a time."""
        async with self._lock:
            transaction = BufferedTransaction(_MemoryView(self._values, self._keys))
            result = await work(transaction)
            for key, value in transaction.changes.items():
                self._set(key, value)
            return result

    async def close(self) -> None:
        """Close nothing: there is nothing to let go of."""

    def _set(self, key: str, value: bytes | None) -> None:
        known = key in self._values
        if value is not None:
            self._values[key] = value
            if not known:
                insort(self._keys, key)
        elif known:
            del self._values[key]
            del self._keys[bisect_right(self._keys, key) - 1]


@final
class _MemoryView(RecordView):
    def __init__(self, values: dict[str, bytes], keys: list[str]) -> None:
        self._values, self._keys = values, keys

    async def read(self, keys: list[str]) -> list[bytes | None]:
        return [self._values.get(key) for key in keys]

    async def range(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        start = bisect_right(self._keys, after) if after >= prefix else _first(self._keys, prefix)
        found = []
        for key in self._keys[start : start + limit]:
            if not key.startswith(prefix):
                break
            found.append((key, self._values[key]))
        return found


def _first(keys: list[str], prefix: str) -> int:
    """The index at which keys that begin with `prefix` would begin."""
    at = bisect_right(keys, prefix)
    return at - 1 if at and keys[at - 1] == prefix else at


@final
class MemoryBlobs(Blobs):
    """The blobs as bytes by name."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._place = secrets.token_hex(16)

    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Keep the bytes."""
        self._blobs[name] = b"".join([piece async for piece in pieces])

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Read the bytes."""
        if name not in self._blobs:
            raise StateDamagedError(f"blob {name} is not there: it was deleted")
        data = self._blobs[name]
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]

    async def has(self, name: str) -> bool:
        """Return whether the bytes are kept."""
        return name in self._blobs

    async def delete(self, name: str) -> None:
        """Forget the bytes."""
        self._blobs.pop(name, None)

    async def names(self) -> AsyncIterator[str]:
        """Iterate over all names."""
        for name in list(self._blobs):
            yield name

    async def place(self) -> str:
        """The name of this object: no other process reaches it."""
        return self._place

    async def close(self) -> None:
        """Close nothing: there is nothing to let go of."""
