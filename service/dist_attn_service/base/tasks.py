"""Several things at once: tasks that end together or wait for each other, and work beside the event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

__all__ = ["Changes", "beside", "stop_tasks", "task_group", "unbroken"]

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises the first error itself, not a group around it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def beside(pool: Executor | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which runs beside the event loop, in a thread of `pool` (None: of asyncio's own).

    For a task that is cancelled meanwhile, work that waits for a thread is not begun. A thread cannot be stopped: work
    that has begun is waited for, so that nothing else uses or closes what it still uses.
    """
    first = threading.Lock()  # held by the first of two: the thread that begins, or the task that was cancelled

    def begin() -> T:
        if not first.acquire(blocking=False):
            raise asyncio.CancelledError
        return work(*args, **kwargs)

    future = asyncio.get_running_loop().run_in_executor(pool, begin)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if first.acquire(blocking=False):
            future.cancel()
        else:
            await asyncio.wait({future})
        raise


async def unbroken(work: Awaitable[T]) -> T:
    """The result of `work`, which is always done to its end: a task that is cancelled meanwhile ends after it."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise


async def stop_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these tasks, and wait until each of them has ended, in whatever way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Changes:
    """A change that tasks wait for: `notify` wakes them, and each looks itself at what has changed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, deadline: float | None = None) -> bool:
        """Wait for the next change; false when `deadline` (of the monotonic clock) came first."""
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._next.wait()
        except TimeoutError:
            return False
        return True
