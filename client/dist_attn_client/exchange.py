"""One piece of work with a service, to its end: requests, what comes back, and going on after a lost connection."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from time import monotonic
from typing import Protocol, TypeVar, final

import msgspec

from dist_attn_api.errors import ClientError, InputError
from dist_attn_api.types import File, Job, Session
from dist_attn_client.attempts import Attempts, Retry
from dist_attn_client.errors import Missing, NotOurAnswer, error_of_answer
from dist_attn_client.plan import Call, Finished, Plan, Reached, told
from dist_attn_client.sources import Source
from dist_attn_client.streams import AsyncStream
from dist_attn_client.transport import Answer, Outgoing, Transport

T = TypeVar("T")
Item = TypeVar("Item")
End = TypeVar("End")
Listed = TypeVar("Listed", File, Job, Session)


class Page(Protocol[Listed]):
    """A part of a list."""

    @property
    def data(self) -> list[Listed]:
        """The entries of the page."""

    @property
    def has_more(self) -> bool:
        """Return whether more entries follow."""


@final
class Exchange:
    """Sends the calls of one client; holds what they share."""

    def __init__(
        self, transport: Transport, url: str, headers: Mapping[str, str], *, retry: Retry, silence_s: float
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")  # the address that OpenAI's clients take serves as well
        if not self._url.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is no URL of a service; give one like http://127.0.0.1:8000")
        self._headers = dict(headers)
        self._retry, self._silence_s = retry, silence_s
        self.transport = transport

    def attempts(self, deadline_s: float | None) -> Attempts:
        """The tries of a new piece of work.

        Raises: InputError for a deadline that is not above 0.
        """
        if deadline_s is not None and not deadline_s > 0:
            raise InputError(f"deadline_s is {deadline_s}; give seconds above 0")
        return Attempts(self._retry, monotonic, deadline_s)

    async def pause(self, attempts: Attempts, error: ClientError, *, repeatable: bool) -> None:
        """Wait until the request may be sent again.

        Raises: `error`, or OutOfTime.
        """
        await self.transport.sleep(attempts.wait_after(error, repeatable=repeatable))

    async def value(self, call: Call, kind: type[T], deadline_s: float | None = None) -> T:
        """The JSON that answers a call, checked against `kind`.

        Raises: ClientError.
        """
        return await self.read(call, lambda _, body: _decoded(body, kind, call), deadline_s)

    async def read(self, call: Call, made: Callable[[Answer, bytes], T], deadline_s: float | None = None) -> T:
        """The result of `made` for the answer to a call; the call is sent again where `made` raises that it broke off.

        Raises: ClientError.
        """
        attempts = self.attempts(deadline_s)
        while True:
            try:
                return made(*await self.whole(call, attempts))
            except ClientError as error:
                await self.pause(attempts, error, repeatable=call.repeatable)

    async def get(self, path: str, kind: type[T], deadline_s: float | None = None) -> T:
        """Get the JSON at a path, checked against `kind`. Raises: Missing, ClientError."""
        return await self.value(Call("GET", path, repeatable=True), kind, deadline_s)

    async def all(self, path: str, kind: type["Page[Listed]"], limit: int = 100) -> list[Listed]:
        """All entries of a list that comes in pages of at most `limit`. Raises: ClientError."""
        entries: list[Listed] = []
        while True:
            query = {"limit": limit, "after": entries[-1].id if entries else None}
            page = await self.value(Call("GET", path, query, repeatable=True), kind)
            entries += page.data
            if not page.has_more or not page.data:
                return entries

    async def delete(self, path: str) -> None:
        """Delete what is at a path; if it is gone after a lost connection, that is success. Raises: ClientError."""
        attempts = self.attempts(None)
        while True:
            try:
                await self.whole(Call("DELETE", path, repeatable=True), attempts)
                return
            except ClientError as error:
                if isinstance(error, Missing) and attempts.failed:
                    return
                await self.pause(attempts, error, repeatable=True)

    async def whole(self, call: Call, attempts: Attempts) -> tuple[Answer, bytes]:
        """Try once; return the head of the answer and its body. Raises: ClientError."""
        async with self._opened(call, attempts) as answer:
            return answer, await _all(answer, attempts)

    def stream(self, plan: Plan[Item, End], deadline_s: float | None = None) -> AsyncStream[Item, End]:
        """Stream the items of a plan through lost connections; the source that it sends is closed at the end.

        Raises: InputError for a deadline that is not above 0.
        """
        parts = self._through(plan, self.attempts(deadline_s))
        return AsyncStream(parts)

    async def _through(self, plan: Plan[Item, End], attempts: Attempts) -> AsyncGenerator[Item | Finished[End], None]:
        """Yield a plan's items, asking again after lost connections. Raises: ClientError once it cannot go on."""
        try:
            while True:
                one = self._once(plan, attempts)
                try:
                    async with aclosing(one):
                        async for item in one:
                            attempts.progressed()
                            yield item
                            if isinstance(item, Finished):
                                return
                except ClientError as error:
                    await self.pause(attempts, error, repeatable=plan.resumable)
        finally:
            if (source := plan.call().source) is not None:
                source.close()

    async def _once(self, plan: Plan[Item, End], attempts: Attempts) -> AsyncGenerator[Item | Finished[End], None]:
        """The parts of one answer.

        Raises: ClientError, also when it ends before its last part.
        """
        async with self._opened(plan.call(), attempts) as answer:
            plan.begin(answer.headers)
            decoder = plan.decoder()
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    attempts.left_s()
                    for part in decoder.push(piece):
                        for item in plan.take(part):
                            yield item
            for item in plan.end():
                yield item

    @asynccontextmanager
    async def _opened(self, call: Call, attempts: Attempts) -> AsyncIterator[Answer]:
        """An answer that is a success, closed at the end. Raises: ClientError."""
        left = attempts.left_s()
        headers, body, sending = _checked(dict(self._headers) | dict(call.headers)), None, None
        if call.json is not None:
            headers["content-type"] = "application/json"
            body = msgspec.json.encode(call.json)
        elif call.source is not None:
            headers.setdefault("content-type", call.source.media_type)
            if call.source.size is not None:
                headers["content-length"] = str(call.source.size - call.start)
            sending = self._sending(call, call.source, attempts)
        request = Outgoing(
            call.method,
            self._url + call.path,
            headers,
            {name: str(value) for name, value in told(call.query).items()},
            body if sending is None else sending,
            self._silence_s if left is None else min(left, self._silence_s),
        )
        async with AsyncExitStack() as stack:
            if sending is not None:
                stack.push_async_callback(sending.aclose)
            answer = await self.transport.send(request)
            stack.push_async_callback(answer.close)
            if answer.status >= 300:
                raise error_of_answer(
                    answer.status, answer.headers, await _all(answer, attempts), what=f"{call.method} {request.url}"
                )
            yield answer

    async def _sending(self, call: Call, source: Source, attempts: Attempts) -> AsyncGenerator[bytes, None]:
        sent = call.start
        async with aclosing(source.pieces(self.transport.blocking, sent)) as pieces:
            async for piece in pieces:
                yield piece
                sent += len(piece)
                attempts.left_s()
                if call.on_sent is not None:
                    call.on_sent(Reached(sent, source.size))


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """Refuse what cannot stand in a header, without repeating it: it may be a key. Raises: InputError."""
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError(f"what was given for the header {name} holds other characters than visible ASCII")
    return headers


async def _all(answer: Answer, attempts: Attempts) -> bytes:
    body = []
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            attempts.left_s()
            body.append(piece)
    return b"".join(body)


def _decoded(body: bytes, kind: type[T], call: Call) -> T:
    """The body as a value of this kind. Raises: NotOurAnswer."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise NotOurAnswer(
            f"{call.what}: the answer is not what this client knows ({error}); is it a dist-attn service, and of about "
            "this client's version?"
        ) from None
