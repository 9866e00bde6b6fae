"""Answers that come bit by bit, as iterators that close their connection when they are left."""

from collections.abc import AsyncGenerator
from typing import Generic, Self, TypeVar, final

from dist_attn_api.errors import ClientError
from dist_attn_client.plan import Finished
from dist_attn_client.transport import at_once

Item = TypeVar("Item")
End = TypeVar("End")


@final
class AsyncStream(Generic[Item, End]):
    """The items of an answer while they come; `end` is the result of the whole.

    Leave it early by `break` inside `async with stream:`, or by `aclose`: that closes the connection, and with it ends
    the work where the service ties it to its client.
    """

    def __init__(self, parts: AsyncGenerator[Item | Finished[End], None]) -> None:
        self._parts = parts
        self._end: Finished[End] | None = None

    def __aiter__(self) -> Self:
        """Return itself: a stream can be gone through once."""
        return self

    async def __anext__(self) -> Item:
        """The next item. Raises: ClientError once it cannot go on."""
        item = await anext(self._parts)
        if isinstance(item, Finished):
            self._end = item
            await self._parts.aclose()
            raise StopAsyncIteration
        return item

    @property
    def end(self) -> End:
        """The result of the whole answer. Raises: ClientError before the last item was taken."""
        if self._end is None:
            raise ClientError("the stream has not come to its end yet; take all items first")
        return self._end.value

    async def rest(self) -> End:
        """Pass over the items that still come, and return `end`."""
        async for _ in self:
            pass
        return self.end

    async def aclose(self) -> None:
        """Take no more; the connection is closed."""
        await self._parts.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self.aclose()


@final
class Stream(Generic[Item, End]):
    """An `AsyncStream` for callers that wait; a loop that is left by `break` closes its connection too."""

    def __init__(self, stream: AsyncStream[Item, End]) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        """Return itself: a stream can be gone through once."""
        return self

    def __next__(self) -> Item:
        """The next item. Raises: ClientError once it cannot go on."""
        try:
            return at_once(anext(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    @property
    def end(self) -> End:
        """The result of the whole answer. Raises: ClientError before the last item was taken."""
        return self._stream.end

    def rest(self) -> End:
        """Pass over the items that still come, and return `end`."""
        return at_once(self._stream.rest())

    def close(self) -> None:
        """Take no more; the connection is closed."""
        at_once(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def __del__(self) -> None:
        """Close a stream that was left in the middle."""
        self.close()
