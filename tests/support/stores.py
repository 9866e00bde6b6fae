"""The places where states can be stored, each as one thing that tests open, close and open again."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dist_attn.store import Reached, Session, StateStore, StoreLimits
from dist_attn.store.disk import DiskBlobs, DiskRecords
from dist_attn.store.memory import MemoryBlobs, MemoryRecords
from dist_attn.store.open import open_blobs
from dist_attn.store.ports import Blobs, Records

__all__ = [
    "KINDS",
    "Clock",
    "StorePlace",
    "kept",
    "place_of",
    "read",
    "redis_server",
    "started_redis",
    "stream",
    "why_no_redis",
    "written",
]

KINDS = ("memory", "disk", "redis", "objects in memory", "objects in files")
START_S = 60.0


@dataclass
class Clock:
    """A time that only moves when it is told to; `step` is how far its wall clock was set away from it."""

    now: float = 1_000_000.0
    step: float = 0.0

    def __call__(self) -> float:
        return self.now + self.step

    def monotonic(self) -> float:
        """The clock that nobody sets."""
        return self.now


@dataclass
class StorePlace:
    """A place, what opens its two halves, and the clock of every store that is opened there."""

    halves: Callable[[], Awaitable[tuple[Records, Blobs]]]
    clock: Clock = field(default_factory=Clock)

    @contextlib.asynccontextmanager
    async def open(self, **limits: Any) -> AsyncIterator[StateStore]:
        """A store here; what it keeps is there when it is opened again. Unless `grace_s` is given it has none."""
        records, blobs = await self.halves()
        kept = StoreLimits(**{"grace_s": 0.0, **limits})
        async with await StateStore.over(records, blobs, kept, self.clock, self.clock.monotonic) as store:
            yield store

    def run(self, work: Callable[[StateStore], Awaitable[Any]], **limits: Any) -> Any:
        """What `work` returns of a store; the store's books must be in order afterwards."""

        async def whole() -> Any:
            async with self.open(**limits) as store:
                result = await work(store)
                assert await store.upkeep.audit() == []
                return result

        return asyncio.run(whole())


@contextlib.contextmanager
def place_of(kind: str, folder: Path) -> Iterator[StorePlace]:
    """A fresh place of this kind."""
    if kind == "memory":
        memory = MemoryRecords(), MemoryBlobs()

        async def in_memory() -> tuple[Records, Blobs]:
            return memory

        yield StorePlace(in_memory)
    elif kind.startswith("objects"):
        url = "memory://" if kind == "objects in memory" else f"file://{folder}"
        in_objects = MemoryRecords(), open_blobs(url)

        async def with_objects() -> tuple[Records, Blobs]:
            return in_objects

        yield StorePlace(with_objects)
    elif kind == "disk":

        async def on_disk() -> tuple[Records, Blobs]:
            return await DiskRecords.open(folder / "catalogue.sqlite"), DiskBlobs(folder / "snapshots")

        yield StorePlace(on_disk)
    else:
        from dist_attn.store.redis import RedisBlobs, RedisRecords, connect

        url = redis_server()

        async def in_redis() -> tuple[Records, Blobs]:
            client = connect(url)
            return RedisRecords(client, folder.name), RedisBlobs(client, folder.name)

        yield StorePlace(in_redis)


async def stream(data: bytes, cuts: Iterable[int] = ()) -> AsyncIterator[bytes]:
    """The bytes in pieces that end at these places."""
    start = 0
    for stop in (*cuts, len(data)):
        yield data[start:stop]
        start = stop


async def read(store: StateStore, tenant: str, name: str) -> bytes:
    """All bytes of a snapshot."""
    return b"".join([piece async for piece in store.snapshots.get(tenant, name)])


async def kept(store: StateStore, tenant: str, data: bytes) -> str:
    """The id of a snapshot of these bytes."""
    return (await store.snapshots.put(tenant, stream(data))).id


async def written(
    store: StateStore, tenant: str, session: Session, position: int, data: bytes | None = None, **options: Any
) -> Session:
    """Append up to `position` in one go."""
    _, token = await store.sessions.begin_append(tenant, session.id, f"to {position}")
    snapshot = await kept(store, tenant, data or f"{session.id} {position}".encode())
    return await store.sessions.advance(tenant, session.id, token, Reached(position, snapshot, done=True, **options))


def why_no_redis() -> str:
    """Why tests with Redis cannot run; empty when they can."""
    if find_spec("redis") is None:
        return "needs redis-py: pip install -e '.[redis]'"
    return "" if shutil.which("redis-server") else "needs redis-server: apt-get install redis-server"


@contextlib.contextmanager
def started_redis(*options: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A Redis server of its own behind a socket in a private folder: its address, and its process."""
    with tempfile.TemporaryDirectory(prefix="dist-attn-redis-") as folder:
        path = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--dir", folder, "--save", ""]
        process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            began = time.monotonic()
            while not _answers(path):
                assert process.poll() is None, "redis-server ended by itself"
                assert time.monotonic() - began < START_S, "redis-server did not start"
                time.sleep(0.01)
            yield f"unix://{path}", process
        finally:
            process.kill()
            process.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@cache
def redis_server() -> str:
    """The address of a server that ends with the tests of this process."""
    import atexit

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(started_redis())[0]
