"""How many requests may be under way at once, and none once the service stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import Code, ServiceError, ServiceStopping

__all__ = ["OpenRequests"]


class OpenRequests:
    """Counts the requests that hold engine work or spools; over the limit the next one is told to come back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0
        self.closed = False
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold one place.

        Raises: ServiceError (429) when all are taken, ServiceStopping after `close`.
        """
        if self.closed:
            raise ServiceStopping
        if self.count >= self._limit:
            raise ServiceError(
                f"{self._limit} requests are under way, which is this service's limit; try again in a moment",
                code=Code.OVERLOADED,
                status=429,
                headers={"retry-after": "2"},
            )
        self.count += 1
        self._none.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._none.set()

    def close(self) -> None:
        """Take no more; those under way go on."""
        self.closed = True

    async def drained(self, within_seconds: float) -> bool:
        """Wait until none is under way; false when that took too long."""
        try:
            async with asyncio.timeout(within_seconds):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
