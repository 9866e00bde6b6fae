"""The synchronous client: each method is the asynchronous client's, run over a transport that never waits."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, final

import httpx

from dist_attn_client.asynchronous import DEFAULT_URL, SILENCE_S, Flows
from dist_attn_client.attempts import DEFAULT_RETRY, Retry
from dist_attn_client.files import AsyncFiles
from dist_attn_client.jobs import AsyncJobs
from dist_attn_client.sessions import AsyncSessions
from dist_attn_client.streams import AsyncStream, Stream
from dist_attn_client.transport import SyncTransport, at_once

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")
End = TypeVar("End")


def _whole(flow: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Turn a coroutine method into one that returns when it is done."""

    @functools.wraps(flow)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return at_once(flow(self._flows, *args, **kwargs))

    return call


def _streamed(
    flow: Callable[Concatenate[Any, P], AsyncStream[Item, End]],
) -> Callable[Concatenate[Any, P], Stream[Item, End]]:
    """Turn a method that gives an asynchronous stream into one that gives a plain one."""

    @functools.wraps(flow)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Stream[Item, End]:
        return Stream(flow(self._flows, *args, **kwargs))

    return call


@final
class Sessions:
    """`/v1/sessions` of one service; see AsyncSessions."""

    def __init__(self, flows: AsyncSessions) -> None:
        self._flows = flows

    create = _whole(AsyncSessions.create)
    all = _whole(AsyncSessions.all)
    get = _whole(AsyncSessions.get)
    delete = _whole(AsyncSessions.delete)
    fork = _whole(AsyncSessions.fork)
    checkpoints = _whole(AsyncSessions.checkpoints)
    append = _streamed(AsyncSessions.append)
    upload = _whole(AsyncSessions.upload)
    generate = _whole(AsyncSessions.generate)
    stream = _streamed(AsyncSessions.stream)
    state = _whole(AsyncSessions.state)
    put_state = _whole(AsyncSessions.put_state)


@final
class Files:
    """`/v1/files` and `/v1/uploads` of one service; see AsyncFiles."""

    def __init__(self, flows: AsyncFiles) -> None:
        self._flows = flows

    upload = _whole(AsyncFiles.upload)
    all = _whole(AsyncFiles.all)
    get = _whole(AsyncFiles.get)
    content = _streamed(AsyncFiles.content)
    delete = _whole(AsyncFiles.delete)


@final
class Jobs:
    """`/v1/jobs` of one service; see AsyncJobs."""

    def __init__(self, flows: AsyncJobs) -> None:
        self._flows = flows

    encode = _whole(AsyncJobs.encode)
    complete = _whole(AsyncJobs.complete)
    all = _whole(AsyncJobs.all)
    get = _whole(AsyncJobs.get)
    events = _streamed(AsyncJobs.events)
    wait = _whole(AsyncJobs.wait)
    rows = _streamed(AsyncJobs.rows)
    completion = _whole(AsyncJobs.completion)
    cancel = _whole(AsyncJobs.cancel)
    delete = _whole(AsyncJobs.delete)


@final
class Client:
    """A dist-attn service. One client may be used by several threads; a stream belongs to one.

    `key` is sent as `Authorization: Bearer`, `retry` says how patiently a request is sent again, `silence_s` how long
    nothing may come or go. `http` is an httpx client of your own, for proxies, certificates or other transports; it is
    not closed with this one.

    Raises: InputError for a URL that is none.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        retry: Retry = DEFAULT_RETRY,
        silence_s: float = SILENCE_S,
        http: httpx.Client | None = None,
    ) -> None:
        self._flows = Flows(SyncTransport(http), url, key=key, retry=retry, silence_s=silence_s)
        self.sessions = Sessions(self._flows.sessions)
        self.files = Files(self._flows.files)
        self.jobs = Jobs(self._flows.jobs)

    encode = _streamed(Flows.encode)
    complete = _whole(Flows.complete)
    stream = _streamed(Flows.stream)
    embed = _whole(Flows.embed)
    search = _whole(Flows.search)
    rerank = _whole(Flows.rerank)
    tokenise = _whole(Flows.tokenise)
    detokenise = _whole(Flows.detokenise)
    estimate = _whole(Flows.estimate)
    models = _whole(Flows.models)
    model = _whole(Flows.model)
    status = _whole(Flows.status)
    ready = _whole(Flows.ready)
    close = _whole(Flows.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        self.close()
