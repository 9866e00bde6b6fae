"""The text of documents that are not plain text, taken out by processes with bounds, a few at once."""

import asyncio
import io
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dist_attn.bounded_process import bounded_command
from dist_attn.errors import InputError
from dist_attn.store.files import BlobFile
from dist_attn.text import documents
from dist_attn.text.documents import MOST_ANSWER, MOST_FILE, WALL_SECONDS, Section, read_answer, refusal_of_kind
from dist_attn.text.plain import HEAD_BYTES, extracted_as
from dist_attn_service.base.errors import Code, ServiceError, TooLarge, disk_code, retry_after
from dist_attn_service.base.tasks import beside
from dist_attn_service.text.spool import DiskBudget
from dist_attn_service.text.text_check import unreadable

PROCESSES, WAIT_SECONDS = 2, 60.0  # at once, and of waiting for one to end
BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Extraction:
    """The folder of documents under way, the budget of bytes that they share with the spools, and their places.

    Whoever waits holds no thread: those of the event loop are for everyone.
    """

    folder: Path
    budget: DiskBudget
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROCESSES))

    async def text_of(self, pieces: AsyncGenerator[bytes], sections: list[Section]) -> AsyncGenerator[bytes]:
        """Yield plain text as it comes; of another document its text in UTF-8, once all of it has come.

        Before its text, `sections` gets those that it has. Whoever sends the pieces has refused what only names HTML.

        Raises: TooLarge; ServiceError (415) for one that cannot be read, (429) where too many wait, (507).
        """
        async with aclosing(pieces):
            piece, size = await anext(pieces, b""), 0
            if not (kind := extracted_as(piece[:HEAD_BYTES])):
                while piece:
                    yield piece
                    piece = await anext(pieces, b"")
                return
            if words := refusal_of_kind(piece[:HEAD_BYTES], kind):
                raise unreadable(words)
            try:
                with BlobFile.unnamed(self.folder) as answer:
                    with BlobFile.unnamed(self.folder) as file:
                        while piece:
                            if size + len(piece) > MOST_FILE:
                                raise TooLarge(f"text is taken out of documents of at most {MOST_FILE} bytes")
                            self.budget.reserve(len(piece))
                            size += len(piece)
                            await beside(None, file.write_at, piece, size - len(piece))
                            piece = await anext(pieces, b"")
                        async with self._place():
                            self.budget.reserve(MOST_ANSWER)
                            size += MOST_ANSWER
                            code = await _exit_code(kind, file, answer)
                    self.budget.release(size - answer.size)
                    size = answer.size
                    text = await beside(None, read_answer, code, io.BufferedReader(answer))
                    sections += text.sections
                    while piece := await beside(None, text.file.read, BLOCK_BYTES):
                        yield piece
            except InputError as error:
                raise unreadable(f"the document {error}") from None
            except OSError as error:
                raise ServiceError(f"the document could not be kept: {error.strerror}", code=disk_code(error)) from None
            finally:
                self.budget.release(size)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self.places.acquire()
        except TimeoutError:
            words = f"{PROCESSES} other documents are being read; send this one again later"
            raise ServiceError(words, code=Code.OVERLOADED, headers=retry_after(WAIT_SECONDS)) from None
        try:
            yield
        finally:
            self.places.release()


async def _exit_code(kind: str, file: BlobFile, answer: BlobFile) -> int:
    """The exit code of the process that takes the text out, which is ended with its task."""
    command, besides = bounded_command(documents.__name__, [kind])
    process = await asyncio.create_subprocess_exec(
        *command, stdin=file.fileno(), stdout=answer.fileno(), stderr=DEVNULL, **besides
    )
    try:
        async with asyncio.timeout(WALL_SECONDS):
            return await process.wait()
    except TimeoutError:
        raise InputError(f"could not be read in {WALL_SECONDS:g} seconds") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
