"""Reads and writes of the store in threads, so that the controller's loop never waits for a disk or a network."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar, final

from dist_attn.errors import StorageError
from dist_attn.store.open import check_place, open_blobs
from dist_attn.store.ports import Blobs

T = TypeVar("T")
AT_ONCE = 8


@final
class StoreWorkers:
    """Threads that use the blobs at an address, each time within a deadline; their results wait to be taken."""

    def __init__(self, address: str, deadline_s: float) -> None:
        check_place(address)
        self._address, self._deadline_s = address, deadline_s
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="store")
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def run(self, work: Callable[[Blobs], Awaitable[T]], then: Callable[[T | Exception], None]) -> None:
        """Begin the work; `then` gets its result, or the exception that ended it, in `take_results`."""

        def done(future: Future[T]) -> None:
            result = future.exception() or future.result()
            self._results.put(lambda: then(result))  # type: ignore[arg-type]
            with contextlib.suppress(OSError):  # it is awake, or closed
                self._waker.send(b"\0")

        self._pool.submit(lambda: asyncio.run(self._use(work))).add_done_callback(done)

    async def _use(self, work: Callable[[Blobs], Awaitable[T]]) -> T:
        blobs = open_blobs(self._address)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work(blobs)
        except TimeoutError:
            raise StorageError(f"the store needed over {self._deadline_s:g} s (engine.reader_deadline_s)") from None
        finally:
            await blobs.close()

    def fileno(self) -> int:
        """The descriptor that can be read when there is a result."""
        return self._woken.fileno()

    def take_results(self) -> None:
        """Hand on what came since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        with contextlib.suppress(Empty):
            while True:
                self._results.get_nowait()()

    def close(self) -> None:
        """Begin no further work; what is under way goes on to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._woken.close()
        self._waker.close()
