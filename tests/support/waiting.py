"""Waiting for what must come: a busy machine is not a failure."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0


def eventually(check: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `check` holds; fails with `what` otherwise."""
    began = time.monotonic()
    while not check():
        waited = time.monotonic() - began
        if waited > seconds:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        # Whatever takes seconds, such as ranks that start, is asked less often: a question over HTTP takes 5 ms.
        time.sleep(min(0.05, 0.01 + waited / 50))


async def until(check: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Let other tasks work until `check` holds."""
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
