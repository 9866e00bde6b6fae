"""Several things at once: work in threads beside the event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from dist_attn_service.base.tasks import beside


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
