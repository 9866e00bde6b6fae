"""Sessions of a service: the model's state of a text, kept between requests."""

import hashlib
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, final

import msgspec

from dist_attn_api.types import (
    AppendProgress,
    AppendSummary,
    Checkpoint,
    CheckpointList,
    Choice,
    Feeding,
    Generation,
    Session,
    SessionList,
    Upload,
)
from dist_attn_client.errors import BrokenOff, NotOurAnswer, ServiceFailed, error_of_words
from dist_attn_client.exchange import Exchange
from dist_attn_client.files import UploadMetadata, send_file
from dist_attn_client.plan import Call, Event, Finished, LineDecoder, OnSent, Plan, path_of, told
from dist_attn_client.sources import Document, Source
from dist_attn_client.streams import AsyncStream
from dist_attn_client.texts import Drawing, DrawnEnd, TextPlan, drawing_body
from dist_attn_client.transport import Answer

POLL_SECONDS = 0.5  # while a session reads what was uploaded


@dataclass(frozen=True)
class State:
    """The snapshot file of a state: its position, its entity tag, and its bytes. It does not hold the text."""

    position: int
    etag: str
    data: bytes


def new_key() -> str:
    """A key under which a request is done once, however often it is sent."""
    return secrets.token_urlsafe(18)


@final
class AsyncSessions:
    """`/v1/sessions` of one service."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(
        self,
        *,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: float | None = None,
        model: str | None = None,
    ) -> Session:
        """Create a session without a text. Raises: ClientError."""
        body = told({"name": name, "metadata": metadata, "ttl_seconds": ttl_seconds, "model": model})
        return await self._exchange.value(Call("POST", "/v1/sessions", json=body), Session)

    async def all(self) -> list[Session]:
        """All sessions of this key. Raises: ClientError."""
        return await self._exchange.all("/v1/sessions", SessionList)

    async def get(self, session: str) -> Session:
        """Get a session with its position. Raises: Missing, ClientError."""
        return await self._exchange.get(_path(session), Session)

    async def delete(self, session: str) -> None:
        """End a session; forks of it live on. Raises: Missing, ClientError."""
        await self._exchange.delete(_path(session))

    async def fork(
        self,
        session: str,
        *,
        position: int | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: float | None = None,
    ) -> Session:
        """Create a session that goes on from a checkpoint of this one, or from its position. Raises: ClientError."""
        body = told({"position": position, "name": name, "metadata": metadata, "ttl_seconds": ttl_seconds})
        return await self._exchange.value(Call("POST", _path(session, "fork"), json=body), Session)

    async def checkpoints(self, session: str) -> list[Checkpoint]:
        """List the checkpoints that a session can be forked from and read at. Raises: ClientError."""
        return (await self._exchange.get(_path(session, "checkpoints"), CheckpointList)).data

    def append(
        self,
        session: str,
        document: Document,
        *,
        expected_position: int | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        on_sent: OnSent | None = None,
    ) -> AsyncStream[AppendProgress, AppendSummary]:
        """Read a text of any length into a session; `end` is the summary, and `rest()` waits for it.

        `key` makes it safe to be sent again, by this call after a lost connection or by a later one after a crash; one
        is made up where none is given.

        Raises: Conflict when the session has another position than expected, ClientError.
        """
        source = Source(document)
        headers = {"idempotency-key": key or new_key()}
        query = {"expected_position": expected_position}
        path = _path(session, "append")
        call = Call("POST", path, query, headers, source=source, on_sent=on_sent, repeatable=True)
        return self._exchange.stream(AppendPlan(call), deadline_s)

    async def upload(
        self,
        session: str,
        document: Document,
        *,
        expected_position: int | None = None,
        deadline_s: float | None = None,
        on_sent: OnSent | None = None,
    ) -> Feeding:
        """Upload a text, which the session reads while it arrives; return when all of it is read.

        As `append`, but what was sent need not be sent again after a lost connection: it goes on at the byte that the
        service has, and the text becomes a file too. A stream is read to its end first.

        Raises: Conflict when the session has another position, ServiceFailed when the text could not be read into it,
            OutOfTime, ClientError.
        """
        source = Source(document)
        upload = UploadMetadata(source.name, source.media_type, session=session, expected_position=expected_position)
        attempts = self._exchange.attempts(deadline_s)
        try:
            sent = await send_file(self._exchange, source, upload, deadline_s=deadline_s, on_sent=on_sent)
        finally:
            source.close()
        while True:
            fed = await self._fed(sent.place, attempts.left_s())
            if fed.state == "done":
                return fed
            if fed.state == "failed":
                raise ServiceFailed(f"the text is a file of the service ({sent.file}), but: {fed.error}")
            await self._exchange.transport.sleep(POLL_SECONDS)

    async def _fed(self, place: str, deadline_s: float | None) -> Feeding:
        upload = await self._exchange.get(place, Upload, deadline_s)
        if upload.session is None:
            raise NotOurAnswer("the service took the upload, but it feeds no session; it is an older one: use append")
        return upload.session

    async def generate(
        self,
        session: str,
        *,
        expected_position: int | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[Drawing],
    ) -> Generation:
        """Let the model go on with the text; what is drawn becomes a part of it, once. Raises: ClientError."""
        call = _generate(session, key, drawing_body(options, expected_position=expected_position))
        return await self._exchange.value(call, Generation, deadline_s)

    def stream(
        self,
        session: str,
        *,
        expected_position: int | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        **options: Unpack[Drawing],
    ) -> AsyncStream[Choice, DrawnEnd]:
        """Stream what `generate` returns, in pieces while they are drawn. Raises: ClientError."""
        body = drawing_body(options, expected_position=expected_position, stream=True)
        return self._exchange.stream(TextPlan(_generate(session, key, body)), deadline_s)

    async def state(self, session: str, *, position: int | None = None) -> State:
        """The snapshot file of the newest state, or of a checkpoint, checked by its digest. Raises: ClientError."""
        call = Call("GET", _path(session, "state"), {"position": position}, repeatable=True)

        def checked(answer: Answer, data: bytes) -> State:
            digest = answer.headers.get("content-digest", "")
            if digest != f"sha-256=:{b64encode(hashlib.sha256(data).digest()).decode()}:":
                raise BrokenOff(f"{call.what}: the bytes are not those of their Content-Digest {digest!r}")
            return State(int(answer.headers["x-session-position"]), answer.headers["etag"], data)

        return await self._exchange.read(call, checked)

    async def put_state(self, session: str, document: Document, *, instead_of: str | None = None) -> Session:
        """Put a snapshot file into a session; where it has a text already, `instead_of` is the tag of its state.

        Raises: Conflict for the state of another model or without the right tag, ClientError.
        """
        source = Source(document)
        headers = {"content-type": "application/octet-stream"}
        if instead_of is not None:
            headers["if-match"] = instead_of
        try:
            call = Call("PUT", _path(session, "state"), headers=headers, source=source)
            return await self._exchange.value(call, Session)
        finally:
            source.close()


@final
class AppendPlan(Plan[AppendProgress, AppendSummary]):
    """An append under a key: sent again whole, each part of it is in the session once.

    Progress that was reported before is left out then.
    """

    decoder = LineDecoder

    def __init__(self, call: Call) -> None:
        self._call = call
        self._position = self._kept = -1  # the furthest that was reported

    def call(self) -> Call:
        """The request, with the same key each time."""
        return self._call

    def take(self, part: bytes | Event) -> Iterator[AppendProgress | Finished[AppendSummary]]:
        """Yield the progress, and at the end the summary. Raises: Refused for an error line."""
        assert isinstance(part, bytes)
        try:
            line = msgspec.json.decode(part, type=dict)
            match line.get("object"):
                case "session.append.progress":
                    progress = msgspec.json.decode(part, type=AppendProgress)
                    if progress.position > self._position or progress.kept > self._kept:
                        self._position = max(self._position, progress.position)
                        self._kept = max(self._kept, progress.kept)
                        yield progress
                case "session.append":
                    yield Finished(msgspec.json.decode(part, type=AppendSummary))
                case "error":
                    raise error_of_words(line, what=self._call.what)
        except msgspec.DecodeError as error:
            raise NotOurAnswer(f"{self._call.what}: a line cannot be read: {error}") from None


def _generate(session: str, key: str | None, body: dict[str, Any]) -> Call:
    headers = {"idempotency-key": key or new_key()}
    return Call("POST", _path(session, "generate"), headers=headers, json=body, repeatable=True)


def _path(session: str, *more: str) -> str:
    return path_of("v1", "sessions", session, *more)
