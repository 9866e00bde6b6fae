"""Several things at once: tasks that end together, and work beside the event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

__all__ = ["beside", "task_group", "unbroken"]

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

    A thread cannot be stopped: a task that is cancelled meanwhile ends when the work is over, so that nobody else uses
    or closes what the work still uses.
    """
    return await unbroken(asyncio.get_running_loop().run_in_executor(pool, lambda: work(*args, **kwargs)))


async def unbroken(work: Awaitable[T]) -> T:
    """The result of `work`, of which no part is left out: a task that is cancelled meanwhile ends when it is over."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
