"""Several things at once: work in threads beside the event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from dist_attn_service.base.tasks import beside, unbroken


def test_a_cancelled_task_ends_when_its_work_is_over() -> None:
    """A format of rows is not asked for its last bytes while a thread is still writing the ones before."""
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(60)

    async def cancel(pool: ThreadPoolExecutor) -> None:
        task = asyncio.create_task(beside(pool, work))
        assert await asyncio.to_thread(began.wait, 60)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.05)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not done

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(cancel(pool))


def test_a_cancelled_task_withdraws_work_that_has_not_begun() -> None:
    """A deadline holds while all threads are busy, and work that nobody waits for is not done."""
    may_end, done = threading.Event(), threading.Event()

    async def cancel(pool: ThreadPoolExecutor) -> None:
        pool.submit(may_end.wait, 60)
        task = asyncio.create_task(beside(pool, done.set))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(cancel(pool))
        may_end.set()
    assert not done.is_set()


def test_unbroken_work_is_done_although_its_task_was_cancelled() -> None:
    """What must not be left out is done also where it still waited for a thread."""
    may_end, done = threading.Event(), threading.Event()

    async def cancel(pool: ThreadPoolExecutor) -> None:
        pool.submit(may_end.wait, 60)
        task = asyncio.create_task(unbroken(beside(pool, done.set)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(cancel(pool))
        assert done.is_set()
