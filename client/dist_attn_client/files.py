"""Files of a service: sent so that a lost connection goes on where it was, listed, read, deleted."""

import mimetypes
from collections.abc import Callable
from typing import final

from dist_attn_client.exchange import Exchange
from dist_attn_client.objects import File, FilePage
from dist_attn_client.plan import Call, Reached, path_of
from dist_attn_client.sessions import delete
from dist_attn_client.sources import Document, Source
from dist_attn_client.streams import AsyncStream
from dist_attn_client.uploads import ContentPlan, Upload, send_file

__all__ = ["AsyncFiles"]

PAGE = 1000


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
        on_sent: Callable[[Reached], None] | None = None,
    ) -> File:
        """Send a document; after a lost connection it goes on at the byte that the service has.

        A stream is read to its end first, as an upload begins with its length. Raises: InputError, ClientError.
        """
        source = Source(document)
        name = filename or source.name
        kind = mime_type or mimetypes.guess_type(name)[0] or source.media_type
        try:
            upload = Upload(name, kind, purpose)
            sent = await send_file(self._exchange, source, upload, deadline_s=deadline_s, on_progress=on_sent)
            return await self.get(sent.file)
        finally:
            source.close()

    async def all(self) -> list[File]:
        """All files of this key, the newest first. Raises: ClientError."""
        found: list[File] = []
        more = True
        while more:
            query = {"limit": PAGE, "after": found[-1].id if found else None}
            page = await self._exchange.value(Call("GET", "/v1/files", query, repeatable=True), FilePage)
            found += page.data
            more = page.has_more and bool(page.data)
        return found

    async def get(self, file: str) -> File:
        """What is known of a file. Raises: Missing, ClientError."""
        return await self._exchange.value(Call("GET", path_of("v1", "files", file), repeatable=True), File)

    def content(self, file: str, *, deadline_s: float | None = None) -> AsyncStream[bytes, int]:
        """The bytes of a file, in pieces; after a lost connection those that are missing. Raises: ClientError."""
        plan = ContentPlan(path_of("v1", "files", file, "content"))
        return self._exchange.stream(plan, deadline_s)

    async def delete(self, file: str) -> None:
        """Remove a file and its bytes. Raises: Missing, ClientError."""
        await delete(self._exchange, path_of("v1", "files", file))
