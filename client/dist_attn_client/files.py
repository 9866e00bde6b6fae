"""Files of a service: sent by tus (tus.io, 1.0.0), so that a lost connection goes on where it was; read, deleted."""

import base64
import mimetypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from dist_attn_api.errors import ClientError
from dist_attn_api.types import File, FileList
from dist_attn_client.attempts import Attempts
from dist_attn_client.errors import BrokenOff, Conflict, NotOurAnswer
from dist_attn_client.exchange import Exchange
from dist_attn_client.plan import Call, Event, Finished, OnSent, Plan, RawDecoder, path_of
from dist_attn_client.sources import Document, Source
from dist_attn_client.streams import AsyncStream

PAGE = 1000
TUS = {"tus-resumable": "1.0.0"}
STREAM = "application/offset+octet-stream"


@final
class AsyncFiles:
    """`/v1/files` and `/v1/uploads` of one service."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def upload(
        self,
        document: Document,
        *,
        filename: str | None = None,
        mime_type: str | None = None,
        purpose: str = "user_data",
        deadline_s: float | None = None,
        on_sent: OnSent | None = None,
    ) -> File:
        """Send a document; after a lost connection it goes on at the byte that the service has.

        A stream is read to its end first, as an upload begins with its length. Raises: InputError, ClientError.
        """
        source = Source(document)
        name = filename or source.name
        kind = mime_type or mimetypes.guess_type(name)[0] or source.media_type
        try:
            upload = UploadMetadata(name, kind, purpose)
            sent = await send_file(self._exchange, source, upload, deadline_s=deadline_s, on_sent=on_sent)
            return await self.get(sent.file)
        finally:
            source.close()

    async def all(self) -> list[File]:
        """All files of this key, the newest first. Raises: ClientError."""
        return await self._exchange.all("/v1/files", FileList, PAGE)

    async def get(self, file: str) -> File:
        """Get the metadata of a file. Raises: Missing, ClientError."""
        return await self._exchange.get(path_of("v1", "files", file), File)

    def content(self, file: str, *, deadline_s: float | None = None) -> AsyncStream[bytes, int]:
        """The bytes of a file, in pieces; after a lost connection those that are missing. Raises: ClientError."""
        plan = ContentPlan(path_of("v1", "files", file, "content"))
        return self._exchange.stream(plan, deadline_s)

    async def delete(self, file: str) -> None:
        """Remove a file and its bytes. Raises: Missing, ClientError."""
        await self._exchange.delete(path_of("v1", "files", file))


# ---- sending -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UploadMetadata:
    """The metadata of a file that is sent."""

    filename: str
    mime_type: str
    purpose: str = "user_data"
    session: str | None = None  # that it feeds while it arrives
    expected_position: int | None = None  # of that session


@dataclass(frozen=True)
class _Sent:
    """An upload that is complete: its path, and the file that it has become."""

    place: str
    file: str


async def send_file(
    exchange: Exchange, source: Source, upload: UploadMetadata, *, deadline_s: float | None, on_sent: OnSent | None
) -> _Sent:
    """A document as a file of the service, through lost connections: it goes on at the byte that is safe.

    Raises: Conflict where a session that it feeds stands elsewhere, ClientError.
    """
    size = await source.measure(exchange.transport.blocking)
    attempts = exchange.attempts(deadline_s)
    place, name = await _begin(exchange, size, upload, attempts)
    if name:
        return _Sent(place, name)  # there was no byte to send
    offset, known = 0, True
    while True:
        try:
            if not known:
                name, safe = await _standing(exchange, place, attempts)
                if name:
                    return _Sent(place, name)
                if safe > offset:
                    attempts.progressed()
                offset, known = safe, True
            return _Sent(place, await _go_on(exchange, place, source, offset, attempts, on_sent))
        except ClientError as error:
            known = False
            if isinstance(error, Conflict) and "expected_position" in error.facts:
                raise  # it is about the session
            # A conflict: the upload's offset is not the one sent here, as after a break that one side has not noticed.
            passing = BrokenOff(str(error)) if isinstance(error, Conflict) else error
            await exchange.pause(attempts, passing, repeatable=True)


async def _begin(exchange: Exchange, size: int, upload: UploadMetadata, attempts: Attempts) -> tuple[str, str]:
    """Create an upload; return its path, and the id of its file if it is complete already, having no bytes."""
    metadata = {"filename": upload.filename, "filetype": upload.mime_type, "purpose": upload.purpose}
    if upload.session is not None:
        metadata["session"] = upload.session
    if upload.expected_position is not None:
        metadata["expected_position"] = str(upload.expected_position)
    coded = ",".join(f"{key} {base64.b64encode(value.encode()).decode()}" for key, value in metadata.items())
    call = Call("POST", "/v1/uploads", headers={**TUS, "upload-length": str(size), "upload-metadata": coded})
    while True:
        try:
            answer, _ = await exchange.whole(call, attempts)
            break
        except ClientError as error:
            await exchange.pause(attempts, error, repeatable=False)
    place = answer.headers.get("location", "")
    if not place.startswith("/"):
        raise NotOurAnswer(f"{call.what}: the answer has no Location of the upload; this service is another one")
    attempts.progressed()
    return place, answer.headers.get("upload-file-id", "")


async def _standing(exchange: Exchange, place: str, attempts: Attempts) -> tuple[str, int]:
    """The id of the file that an upload has become, empty before, and the number of bytes that are safe."""
    call = Call("HEAD", place, headers=TUS, repeatable=True)
    answer, _ = await exchange.whole(call, attempts)
    offset = answer.headers.get("upload-offset", "")
    if not offset.isdecimal():
        raise NotOurAnswer(f"{call.what}: the answer has no upload-offset; this service is another one")
    return answer.headers.get("upload-file-id", ""), int(offset)


async def _go_on(
    exchange: Exchange, place: str, source: Source, offset: int, attempts: Attempts, on_sent: OnSent | None
) -> str:
    """Send the bytes from `offset` on; return the id of the file that they complete."""
    headers = {**TUS, "upload-offset": str(offset), "content-type": STREAM}
    call = Call("PATCH", place, headers=headers, source=source, start=offset, on_sent=on_sent)
    answer, _ = await exchange.whole(call, attempts)
    name = answer.headers.get("upload-file-id", "")
    if not name:
        raise BrokenOff(f"{call.what}: the upload is not complete after its last byte")
    return name


@final
class ContentPlan(Plan[bytes, int]):
    """The bytes of a file, each once; the end is how many came."""

    decoder = RawDecoder

    def __init__(self, path: str) -> None:
        self._path = path
        self._had = 0
        self._tag = ""
        self._due: int | None = None
        self._skip = 0

    def call(self) -> Call:
        """The request for all bytes, or for those that are missing."""
        headers = {"range": f"bytes={self._had}-", "if-range": self._tag} if self._had and self._tag else {}
        return Call("GET", self._path, headers=headers, repeatable=True)

    def begin(self, headers: Mapping[str, str]) -> None:
        """Note where the answer begins: a service may send all again."""
        self._tag = headers.get("etag", "")
        part = headers.get("content-range", "")
        start = int(part.removeprefix("bytes ").partition("-")[0]) if part.startswith("bytes ") else 0
        self._skip = self._had - start
        length = headers.get("content-length", "")
        self._due = start + int(length) if length.isdecimal() else None

    def take(self, part: bytes | Event) -> Iterator[bytes | Finished[int]]:
        """Yield the bytes that had not come before."""
        assert isinstance(part, bytes)
        new, self._skip = part[self._skip :], max(0, self._skip - len(part))
        if new:
            self._had += len(new)
            yield new

    def end(self) -> Iterator[bytes | Finished[int]]:
        """Finish with the number of bytes. Raises: BrokenOff when fewer came than announced."""
        if self._due is not None and self._had < self._due:
            raise BrokenOff(f"GET {self._path}: {self._had} of {self._due} bytes came")
        yield Finished(self._had)
