"""The store in Redis, for several hosts that share sessions: records as strings, blobs as lists of pieces.

Transactions are optimistic: all of them watch one version number, so one that met another's changes runs again. They
are few (one for a checkpoint, not for a token), which is what makes this simple rule good enough.
How durable it is, and what happens when memory ends, is Redis's own configuration (docs/state.md).
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, final

from dist_attn.errors import MissingExtraError, StateDamagedError, StorageError, extra_hint
from dist_attn.store.ports import PIECE_BYTES, Blobs, BufferedTransaction, Records, RecordView

if TYPE_CHECKING:
    import redis.asyncio

T = TypeVar("T")

ATTEMPTS = 200
LONGEST_PAUSE_S = 0.05
WRITING_TTL_S = 3600  # what a writer that died has left goes away by itself
ANSWER_S = 10.0  # also of waiting for one of the CONNECTIONS of a process
CONNECTIONS = 50
DONE_S = 600  # that a change leaves a mark of itself


def connect(url: str) -> "redis.asyncio.Redis":
    """Make a client for redis://, rediss:// and unix:// addresses; nothing is sent yet.

    Raises: MissingExtraError without redis-py, StorageError for an address that it does not understand.
    """
    try:
        import redis.asyncio
    except ImportError:
        raise MissingExtraError(
            f"states are to be kept at {url.split('@')[-1]}, which needs redis-py: {extra_hint('redis')}"
        ) from None
    try:
        # By itself redis-py refuses what comes while all connections are taken; here it waits for one.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=ANSWER_S,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
        )
        return redis.asyncio.Redis.from_pool(pool)
    except ValueError as error:
        raise StorageError(f"the address of the store is not one of Redis: {error}") from None


@final
class RedisRecords(Records):
    """The records as strings, and a sorted set of their keys; `{…}` keeps all of them in one slot of a cluster."""

    def __init__(self, client: "redis.asyncio.Redis", namespace: str) -> None:
        self._client = client
        self._names = _Names(namespace)

    async def transact(self, work: Callable[[BufferedTransaction], Awaitable[T]]) -> T:
        """Run the work, again while others were faster.

        Changes leave a mark: where the answer to them was lost, redis-py says so as if another had been faster.
        """
        import redis.exceptions

        done = self._names.done(secrets.token_hex(16))
        with _refusals():
            for attempt in range(ATTEMPTS):
                pipe: Any
                async with self._client.pipeline() as pipe:
                    await pipe.watch(self._names.version)
                    transaction = BufferedTransaction(_RedisView(pipe, self._names))
                    result = await work(transaction)
                    pipe.multi()
                    self._write(pipe, transaction.changes)
                    if transaction.changes:
                        pipe.set(done, 1, ex=DONE_S)
                    try:
                        await pipe.execute()
                    except redis.exceptions.WatchError:
                        await pipe.reset()  # gives its connection back before another is asked for
                        if transaction.changes and await self._client.exists(done):
                            return result
                        await asyncio.sleep(random.random() * min(LONGEST_PAUSE_S, 0.001 * (attempt + 1)))
                        continue
                    return result
        raise StorageError(f"a change of the store met others {ATTEMPTS} times; too many write at once, try again")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _write(self, pipe: Any, changes: dict[str, bytes | None]) -> None:
        if not changes:
            pipe.ping()  # so that what was read is known to have stood at one moment
            return
        pipe.incr(self._names.version)
        for key, value in changes.items():
            if value is None:
                pipe.delete(self._names.record(key))
                pipe.zrem(self._names.keys, key)
            else:
                pipe.set(self._names.record(key), value)
                pipe.zadd(self._names.keys, {key: 0})


@final
class _RedisView(RecordView):
    def __init__(self, pipe: Any, names: "_Names") -> None:
        self._pipe, self._names = pipe, names

    async def read(self, keys: list[str]) -> list[bytes | None]:
        found: list[bytes | None] = await self._pipe.mget([self._names.record(key) for key in keys])
        return found

    async def range(self, prefix: str, after: str, limit: int) -> list[tuple[str, bytes]]:
        first = f"({after}" if after >= prefix else f"[{prefix}"
        keys = [
            key.decode()
            for key in await self._pipe.zrangebylex(self._names.keys, first, f"({prefix}\U0010ffff", 0, limit)
        ]
        values = await self.read(keys) if keys else []
        return [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]


@final
class RedisBlobs(Blobs):
    """The blobs as lists of pieces; one that is not whole yet expires by itself."""

    def __init__(self, client: "redis.asyncio.Redis", namespace: str) -> None:
        self._client: Any = client
        self._names = _Names(namespace)

    async def write(self, name: str, pieces: AsyncIterable[bytes]) -> None:
        """Append the pieces, then let the blob expire no more."""
        key = self._names.blob(name)
        with _refusals():
            try:
                async for piece in pieces:
                    async with self._client.pipeline() as pipe:
                        await pipe.rpush(key, piece).expire(key, WRITING_TTL_S).execute()
                await self._client.persist(key)
            except BaseException:
                # If it cannot be deleted now, it expires.
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._client.unlink(key))
                raise

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Read the blob piece by piece."""
        key = self._names.blob(name)
        with _refusals():
            count = await self._client.llen(key)
            if not count:
                raise StateDamagedError(f"blob {name} is not there: it was deleted")
            for at in range(count):
                piece = await self._client.lindex(key, at)
                if piece is None:
                    raise StateDamagedError(f"blob {name} was deleted while it was read")
                for start in range(0, len(piece), PIECE_BYTES):
                    yield piece[start : start + PIECE_BYTES]

    async def has(self, name: str) -> bool:
        """Return whether the list is there."""
        with _refusals():
            return bool(await self._client.exists(self._names.blob(name)))

    async def delete(self, name: str) -> None:
        """Remove the list."""
        with _refusals():
            await self._client.unlink(self._names.blob(name))

    async def names(self) -> AsyncIterator[str]:
        """Iterate over the names of all blobs, unfinished ones too."""
        with _refusals():
            async for key in self._client.scan_iter(match=self._names.blob("*"), count=5000):
                yield key.decode().rsplit(":", 1)[-1]

    async def place(self) -> str:
        """Read the name from a key beside the blobs."""
        with _refusals():
            await self._client.set(self._names.place, secrets.token_hex(16), nx=True)
            return str((await self._client.get(self._names.place)).decode())

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


@final
class _Names:
    """The keys of one store among others in the same Redis."""

    def __init__(self, namespace: str) -> None:
        self._root = f"{{{namespace}}}"
        self.version = f"{self._root}:version"
        self.keys = f"{self._root}:keys"
        self.place = f"{self._root}:place"

    def done(self, token: str) -> str:
        return f"{self._root}:done:{token}"

    def record(self, key: str) -> str:
        return f"{self._root}:record:{key}"

    def blob(self, name: str) -> str:
        return f"{self._root}:blob:{name}"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of redis-py into a StorageError."""
    import redis.exceptions

    try:
        yield
    except redis.exceptions.OutOfMemoryError:
        raise StorageError(
            "a state could not be kept: Redis has used its memory; raise maxmemory or keep less"
        ) from None
    except redis.exceptions.RedisError as error:
        raise StorageError(f"Redis did not do as asked: {error or type(error).__name__}") from None
