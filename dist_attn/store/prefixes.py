"""The index of texts that were read before: the longest stored prefix of a token sequence, at points of a grid."""

import hashlib
import re
from collections.abc import Sequence
from typing import final

from dist_attn.errors import ConfigError, InputError
from dist_attn.store.entries import Checkpoint, PrefixRecord
from dist_attn.store.state_ledger import Place, StateLedger

TOKEN_BYTES = 4
LOOKED_UP = 256  # keys of one transaction


@final
class PrefixHasher:
    """A maker of keys for the prefixes of a stream of tokens, one key at every point of the grid.

    Each key is the SHA-256 of the one before and the tokens since, so a text is hashed once however long it is. The
    first one depends on the caller, the model and the grid: what two callers have read has nothing in common.
    """

    def __init__(self, salt: str, model: str, grid: int) -> None:
        if grid < 1:
            raise ConfigError(f"a grid of {grid} tokens was given; it must be 1 or more")
        self._link = hashlib.sha256(f"{salt}/{model}/{grid}".encode()).digest()
        self._grid_bytes = grid * TOKEN_BYTES
        self._grid = grid
        self._rest = bytearray()
        self.points = 0
        """The number of points of the grid that have been passed."""

    def update(self, tokens: bytes | memoryview) -> list[tuple[int, str]]:
        """Take the next tokens, raw little-endian int32; returns the positions that are passed now, and their keys."""
        self._rest += tokens
        passed = []
        at = 0
        while len(self._rest) - at >= self._grid_bytes:
            self._link = hashlib.sha256(self._link + self._rest[at : at + self._grid_bytes]).digest()
            at += self._grid_bytes
            self.points += 1
            passed.append((self.points * self._grid, self._link.hex()))
        del self._rest[:at]
        return passed


@final
class Prefixes:
    """The prefix index of a place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def hasher(self, tenant: str, model: str, grid: int) -> PrefixHasher:
        """Make a hasher for texts of this caller, read by this model (named by its identity) in blocks of this grid."""
        return PrefixHasher(self._place.salted("prefix", self._place.tenant(tenant).encode()), model, grid)

    async def remember(self, tenant: str, key: str, position: int, snapshot: str) -> None:
        """Enter the snapshot of the state after this prefix, which is kept as long as the entry is.

        Raises: UnknownStateError when the snapshot is not there.
        """
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise InputError(f"{key[:80]!r} is not the key of a prefix; take those that a PrefixHasher gives")
        tag = self._place.tenant(tenant)

        async def enter(ledger: StateLedger) -> None:
            known = await ledger.find(PrefixRecord, key)
            if known is not None:
                await ledger.touch_prefix(key, known)
            else:
                await ledger.add_prefix(key, PrefixRecord(tag, position, snapshot, ledger.now))

        await self._place.change(enter)

    async def longest(self, tenant: str, keys: Sequence[tuple[int, str]]) -> Checkpoint | None:
        """Find the last of these prefixes, given in order, whose state is stored; it counts as used.

        Raises: StorageError.
        """
        tag = self._place.tenant(tenant)
        for stop in range(len(keys), 0, -LOOKED_UP):
            part = keys[max(0, stop - LOOKED_UP) : stop]

            async def look(ledger: StateLedger, part: Sequence[tuple[int, str]] = part) -> Checkpoint | None:
                records = await ledger.find_all(PrefixRecord, [key for _, key in part])
                for (position, key), record in reversed(list(zip(part, records, strict=True))):
                    if record is not None and record.tenant == tag and record.position == position:
                        snapshot = await ledger.owned_snapshot(tag, record.snapshot)
                        await ledger.touch_prefix(key, record)
                        return Checkpoint(position, record.snapshot, snapshot.made_at)
                return None

            point = await self._place.change(look)
            if point is not None:
                return point
        return None

    async def forget(self, tenant: str, key: str) -> None:
        """Drop an entry, if it is there and this caller's."""
        tag = self._place.tenant(tenant)

        async def drop(ledger: StateLedger) -> None:
            record = await ledger.find(PrefixRecord, key)
            if record is not None and record.tenant == tag:
                await ledger.drop_prefix(key)

        await self._place.change(drop)
