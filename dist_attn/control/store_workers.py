"""Reads and writes of the store in threads, so that the controller's loop never waits for a disk or a network."""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar, final

from dist_attn.errors import StorageError
from dist_attn.store.open import check_place, open_blobs
from dist_attn.store.ports import Blobs

T = TypeVar("T")
AT_ONCE = 8
CLOSE_S = 1.0  # for work that is under way to end early


@dataclass(eq=False)
class _Job:
    work: Callable[[Blobs], Awaitable[Any]]
    then: Callable[[Any], None]
    late: Callable[[Any], None]
    given_up: Event
    deadline: float
    settled: bool = False  # `then` was called


@final
class StoreWorkers:
    """Threads that use the blobs at an address, each time within a deadline; their results wait to be taken.

    A call that hangs in the system keeps its thread, and neither the deadline nor the end of the process waits for it.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        check_place(address)
        self._address, self._deadline_s = address, deadline_s
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs: deque[_Job] = deque()  # in the order of their deadlines; some may be settled
        self._results: SimpleQueue[tuple[_Job, object]] = SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._threads = [Thread(target=self._serve, name=f"store-{n}", daemon=True) for n in range(AT_ONCE)]
        for thread in self._threads:
            thread.start()

    def run(
        self,
        work: Callable[[Blobs], Awaitable[T]],
        then: Callable[[T | Exception], None],
        given_up: Event | None = None,
        late: Callable[[T | Exception], None] = lambda _: None,
    ) -> None:
        """Begin the work; in `take_results` `then` gets its result, or the exception that ended it.

        Past the deadline, which counts the wait for a thread, that is a StorageError, and `late` gets the result.
        Who sets `given_up` has work that waits not begun; work that is under way may read it. So does the deadline.
        """
        job = _Job(work, then, late, given_up or Event(), time.monotonic() + self._deadline_s)
        self._jobs.append(job)
        self._queue.put(job)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            result: object
            try:
                result = self._result(job)
            except Exception as error:
                result = error
            self._results.put((job, result))
            with contextlib.suppress(OSError):  # it is awake, or closed
                self._waker.send(b"\0")

    def _result(self, job: _Job) -> object:
        if job.given_up.is_set():
            raise StorageError("nobody waits for it any more")
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_SameThread())
            return runner.run(self._use(job))

    async def _use(self, job: _Job) -> object:
        blobs = open_blobs(self._address)
        try:
            async with asyncio.timeout(job.deadline - time.monotonic()):
                return await job.work(blobs)
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            await blobs.close()

    def _too_slow(self) -> StorageError:
        return StorageError(f"the store needed over {self._deadline_s:g} s (engine.reader_deadline_s)")

    def fileno(self) -> int:
        """The descriptor that can be read when there is a result."""
        return self._woken.fileno()

    def take_results(self) -> None:
        """Hand on what came since the last call, and what did not come in time."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        with contextlib.suppress(Empty):
            while True:
                job, result = self._results.get_nowait()
                hand_on = job.late if job.settled else job.then
                job.settled = True
                hand_on(result)
        while self._jobs and (self._jobs[0].settled or self._jobs[0].deadline < time.monotonic()):
            job = self._jobs.popleft()
            if not job.settled:
                job.settled = True
                job.given_up.set()
                job.then(self._too_slow())

    def close(self) -> None:
        """Begin no further work, and give up what is under way; what hangs is left."""
        for job in self._jobs:
            job.given_up.set()
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._woken.close()
        self._waker.close()


@final
class _SameThread(ThreadPoolExecutor):
    """Calls what blocks at once: a thread of its own would be waited for at the end of the process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
