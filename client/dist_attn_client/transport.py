"""The transport of bytes: httpx, synchronous or asynchronous, behind one interface with awaitable methods.

The synchronous transport's methods never wait in the sense of `await`, so that `at_once` runs any coroutine over it to
its end without an event loop. All that is above is therefore written once, for both.
"""

import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar, final

import anyio
import anyio.to_thread
import httpx

from dist_attn_api.errors import InputError
from dist_attn_client.errors import BrokenOff, Unreachable

P = ParamSpec("P")
T = TypeVar("T")
NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
NO_URL = (httpx.UnsupportedProtocol, httpx.InvalidURL)
CONNECT_S = 10.0


@dataclass(frozen=True)
class Outgoing:
    """One request as it goes out. `silence_s` is how long nothing may come or go."""

    method: str
    url: str
    headers: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] | None = None
    silence_s: float = 600.0


class Answer(Protocol):
    """The head of an answer, and its body while it comes."""

    status: int
    headers: Mapping[str, str]

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body; BrokenOff when it ends too early."""

    async def close(self) -> None:
        """Give up what has not come yet."""


class Transport(Protocol):
    """A sender of requests, which does the other things that take time too."""

    async def send(self, request: Outgoing) -> Answer:
        """Send a request and return when the head of its answer is there.

        Raises: Unreachable, BrokenOff; InputError for a URL that is none.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""

    async def blocking(self, work: Callable[[], T], /) -> T:
        """Run something that may wait for a disk."""

    async def close(self) -> None:
        """Close all connections."""


def at_once(work: Awaitable[T]) -> T:
    """The result of a coroutine that never waits.

    Raises: RuntimeError when it does: an asynchronous iterable was given to the synchronous client.
    """
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    refusal = RuntimeError("the synchronous client cannot wait for asynchronous iterables; take AsyncClient for them")
    steps.throw(refusal)  # where it waits, so that nothing of it stays half done
    raise refusal


def _done(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Turn a method into a coroutine that is done as soon as it is awaited."""

    @functools.wraps(call)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    return answer


def _built(
    client: httpx.Client | httpx.AsyncClient,
    request: Outgoing,
    body: bytes | Iterator[bytes] | AsyncIterator[bytes] | None,
) -> httpx.Request:
    """The request as httpx sends it, with what the httpx client adds to each."""
    timeout = httpx.Timeout(request.silence_s, connect=min(CONNECT_S, request.silence_s))
    query, headers = request.query, request.headers
    return client.build_request(
        request.method, request.url, params=query, headers=headers, content=body, timeout=timeout
    )


# ---- synchronous ---------------------------------------------------------------------------------


@final
class SyncTransport:
    """httpx.Client; nothing here ever waits for an event loop."""

    def __init__(self, client: httpx.Client | None = None) -> None:
        self._own = client is None
        self._client = client or httpx.Client()

    @_done
    def send(self, request: Outgoing) -> Answer:
        """Send, and return when the head of the answer is there."""
        body = _drained(request.body) if isinstance(request.body, AsyncIterator) else request.body
        try:
            return _SyncAnswer(self._client.send(_built(self._client, request, body), stream=True))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _failure(error, request) from error

    @_done
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @_done
    def blocking(self, work: Callable[[], T], /) -> T:
        """Run the work in this thread."""
        return work()

    @_done
    def close(self) -> None:
        """Close all connections, unless the httpx client is the caller's."""
        if self._own:
            self._client.close()


@final
class _SyncAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        body = self._response.iter_bytes()
        while True:
            try:
                piece = next(body, None)
            except httpx.RequestError as error:
                raise _broken(error) from error
            if piece is None:
                return
            yield piece

    @_done
    def close(self) -> None:
        self._response.close()


def _drained(pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
    while (piece := at_once(anext(pieces, None))) is not None:
        yield piece


# ---- asynchronous --------------------------------------------------------------------------------


@final
class AsyncTransport:
    """httpx.AsyncClient."""

    def __init__(self, client: httpx.AsyncClient | None = None) -> None:
        self._own = client is None
        self._client = client or httpx.AsyncClient()

    async def send(self, request: Outgoing) -> Answer:
        """Send, and return when the head of the answer is there."""
        try:
            made = _built(self._client, request, request.body)
            return _AsyncAnswer(await self._client.send(made, stream=True))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _failure(error, request) from error

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def blocking(self, work: Callable[[], T], /) -> T:
        """Run the work in another thread, beside the event loop."""
        return await anyio.to_thread.run_sync(work)

    async def close(self) -> None:
        """Close all connections, unless the httpx client is the caller's."""
        if self._own:
            await self._client.aclose()


@final
class _AsyncAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in self._response.aiter_bytes():
                yield piece
        except httpx.RequestError as error:
            raise _broken(error) from error

    async def close(self) -> None:
        await self._response.aclose()


# ---- what goes wrong -----------------------------------------------------------------------------


def _failure(error: Exception, request: Outgoing) -> Exception:
    """The client's exception for one of httpx; Unreachable says that nothing was sent, so that it may be sent again."""
    if isinstance(error, NO_URL):
        return InputError(f"{request.url} is no URL of a service ({error}); give one like http://127.0.0.1:8000")
    if isinstance(error, NOT_CONNECTED):
        return Unreachable(f"no service answers at {request.url} ({error}); is it running, and is the URL right?")
    return _broken(error)


def _broken(error: Exception) -> BrokenOff:
    silent = isinstance(error, httpx.TimeoutException)
    words = "nothing came for too long" if silent else f"the connection broke off ({error or type(error).__name__})"
    return BrokenOff(f"{words}; whether the service did it is not known")
