"""Where a session's answer goes for as long as somebody takes it: work on a session does not end with its client."""

import asyncio
from collections.abc import Awaitable
from typing import final

from dist_attn_service.base.errors import ClientGone
from dist_attn_service.http.exchange import RequestBody, ResponseWriter

__all__ = ["Outlet"]


@final
class Outlet:
    """Writes to a client until it is gone; from then on to nobody."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self.gone = asyncio.Event()

    async def start(self, media_type: str) -> None:
        """Send the head."""
        await self._unless_gone(self._writer.start(media_type))

    async def write(self, data: bytes) -> None:
        """Send bytes as soon as the client takes them."""
        if not self.gone.is_set():
            await self._unless_gone(self._writer.write(data))

    async def finish(self, data: bytes) -> None:
        """Send the last bytes.

        Raises: ClientGone when nobody is there any more, so that the log says so.
        """
        if self.gone.is_set():
            raise ClientGone
        await self._writer.finish(data)

    async def watch(self, body: RequestBody) -> None:
        """Return when the client has left or has its whole answer; the body must have come."""
        try:
            await body.until_gone()
        except ClientGone:
            self.gone.set()

    async def _unless_gone(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except ClientGone:
            self.gone.set()
