"""One place with its secret, its bounds and its clock: what all parts of a store work with."""

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dist_attn.errors import StorageError
from dist_attn.store.blobs import Blobs
from dist_attn.store.entries import StoreLimits
from dist_attn.store.ledger import change, salted, secret_of
from dist_attn.store.records import Records
from dist_attn.store.state_ledger import StateLedger

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Records and blobs, the secret that salts every id, the time in seconds since 1970, and a monotonic clock."""

    records: Records
    blobs: Blobs
    limits: StoreLimits
    secret: bytes = field(repr=False)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @staticmethod
    async def open(
        records: Records,
        blobs: Blobs,
        limits: StoreLimits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> "Place":
        """The place, with the secret that was drawn when it was first opened.

        Raises: StorageError.
        """
        return Place(records, blobs, limits, await secret_of(records), clock, monotonic)

    def tenant(self, name: str) -> str:
        """A caller's name as it stands in keys: a salted hash, so that names are neither shown nor misread."""
        return self.salted("tenant", name.encode())[:32]

    def salted(self, use: str, *parts: bytes) -> str:
        """HMAC-SHA256 of some bytes in hex; no two uses, and no two ways to cut the bytes, have equal ones."""
        return salted(self.secret, b"".join(len(part).to_bytes(8, "little") + part for part in (use.encode(), *parts)))

    async def change(self, work: Callable[[StateLedger], Awaitable[T]]) -> T:
        """Run work on the ledger in one transaction, and delete the blobs that it has dropped.

        Raises: StorageError; whatever `work` raises, and then nothing changes.
        """
        result, dropped = await change(
            self.records, lambda transaction: StateLedger(transaction, self.limits, self.clock()), work
        )
        for blob in dropped:
            # The change is made; bytes that stay are swept away later.
            with contextlib.suppress(StorageError):
                await self.blobs.delete(blob)
        return result
