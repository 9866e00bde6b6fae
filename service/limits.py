"""How many requests may be under way at once, none once the service stops, and the memory of their JSON bodies."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import Code, ServiceError, ServiceStopping

__all__ = ["BodyMemory", "OpenRequests"]


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


class BodyMemory:
    """Bytes of JSON bodies that requests under way hold together; what would go over the limit is told to come back.

    Units: bytes as they arrive; parsed, a body takes several times as much.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def hold(self, at_end: Callable[[Callable[[], None]], None]) -> Callable[[int], None]:
        """A function that takes so many bytes more for one request; `at_end` is given what gives them all back.

        Raises: ServiceError (429) from that function over the limit, unless no other request holds any.
        """
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held + size > self._limit and self.held > mine:
                raise ServiceError(
                    f"JSON bodies of requests under way hold {self.held} bytes, and the limit is {self._limit}; try "
                    "again in a moment, or send a long text as text/plain to /v1/encodings",
                    code=Code.OVERLOADED,
                    status=429,
                    headers={"retry-after": "2"},
                )
            mine += size
            self.held += size

        def give_back() -> None:
            self.held -= mine

        at_end(give_back)
        return take
