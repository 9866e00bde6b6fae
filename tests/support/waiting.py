"""Waiting for what must come: a busy machine is not a failure."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0


def eventually(check: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `check` holds; fails with `what` otherwise."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(0.01)


async def until(check: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Let other tasks work until `check` holds."""
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
