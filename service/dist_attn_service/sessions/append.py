"""An append to a session: body -> tokens -> engine, its states into the store as they come, each token fed once."""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import msgspec
import numpy as np

from dist_attn.store import Reached
from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import Keep, OpenWork
from dist_attn_api.types import Answer, AppendProgress, AppendSummary
from dist_attn_service.base.errors import BadRequest, ClientGone, Code, Conflict, TooLarge
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.tasks import task_group
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.http.exchange import RequestBody, ResponseWriter
from dist_attn_service.sessions.answers import AnswerOutlet, watch
from dist_attn_service.sessions.writer import SessionWriter, TextRun, writing
from dist_attn_service.text.tokenising import Piece

__all__ = ["AppendService", "AppendSource"]

NDJSON = "application/x-ndjson"
BETWEEN_LINES_SECONDS = 0.1


@dataclass(frozen=True)
class AppendSource:
    """The text to append, with its key and position: a body that still arrives, a text of JSON, or a stored file.

    `pieces` gives it once, as it comes, and checks it; a text or a file is here as a whole, so a client that leaves
    does not cut it off. `digest` is the SHA-256 in hex of a text that is here already.
    """

    body: RequestBody
    key: str
    expected_position: int | None
    pieces: AsyncGenerator[bytes]
    digest: str = ""
    terms: RequestTerms = field(default_factory=RequestTerms)


@final
class _FedTokens:
    """The tokens of an append from position `start` on, and their digest. Memory: the tokens after the last digest."""

    def __init__(self, start: int) -> None:
        self._digest = hashlib.sha256()
        self._hashed = start
        self._waiting: deque[TokenArray] = deque()
        self.stop = start
        """The position after the last token."""

    def push(self, tokens: TokenArray) -> None:
        """Add the next tokens."""
        if len(tokens):
            self._waiting.append(tokens)
            self.stop += len(tokens)

    def digest_at(self, position: int) -> str:
        """The SHA-256 in hex of the tokens before `position`, which must not be below that of the last call."""
        assert self._hashed <= position <= self.stop, (self._hashed, position, self.stop)
        while self._hashed < position:
            tokens = self._waiting.popleft()
            taken = min(len(tokens), position - self._hashed)
            if taken < len(tokens):
                self._waiting.appendleft(tokens[taken:])
            self._digest.update(np.ascontiguousarray(tokens[:taken], dtype="<i4").data)
            self._hashed += taken
        return self._digest.hexdigest()


@dataclass
class _Append:
    """The moving parts of one append."""

    source: AppendSource
    writer: SessionWriter
    outlet: AnswerOutlet
    fed: _FedTokens
    content: Any = field(default_factory=hashlib.sha256)
    text_bytes: int = 0
    read: asyncio.Event = field(default_factory=asyncio.Event)  # to its end

    async def advance(self, position: int, snapshot: str) -> None:
        """Move the session to this position and state, with the digest of the tokens fed."""
        await self.writer.advance(Reached(position, snapshot, fed=self.fed.digest_at(position)))


@final
class AppendService:
    """The service that answers appends; holds what they share, nothing of any one of them."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def answer(
        self, session_id: str, source: AppendSource, response: ResponseWriter, record: RequestRecord
    ) -> None:
        """Feed a text to a session; the head goes out after the first bytes of it came in.

        A client that leaves does not end the work: the text that came is read as far as whole states can be kept.

        Raises: ServiceError, whose `position` is that up to which everything is kept; ClientGone when the client left.
        """
        outlet, key = AnswerOutlet(response), f"append {source.key}" if source.key else ""
        async with writing(
            self._context.store, record.caller, session_id, key, source.expected_position, digest=source.digest
        ) as writer:
            append = _Append(source, writer, outlet, _FedTokens(writer.append.start))
            if writer.done:
                await self._say_again(append)
                return
            try:
                await self._work(append, record)
            finally:
                tokens = append.fed.stop - writer.append.start
                record.note(session=session_id, tokens=tokens, position=writer.kept, input_bytes=append.text_bytes)
                self._context.metrics.tokens("prompt", tokens)

    async def _work(self, append: _Append, record: RequestRecord) -> None:
        blocks = self._text(append)
        first = await anext(blocks, b"")
        if not first:
            raise BadRequest("the body is empty; send a text", code=Code.EMPTY_INPUT, param="input")
        await self._context.watch.until_ready()
        self._context.watch.manifest()
        keep = Keep(self._context.settings.checkpoint_tokens, end=True)
        begin, terms = await append.writer.begin(), append.source.terms.for_engine()
        run = TextRun(self._context, append.writer, append.advance)
        work = OpenWork(record.request_id, begin, keep=keep, terms=terms)
        async with self._context.open(work, await append.writer.maker(self._context)) as stream:
            await append.outlet.start(NDJSON)
            async with task_group() as group:
                tasks = [group.create_task(self._tell(append, run)), group.create_task(_watch(append))]
                report = await run.work(stream, self._pieces(append, run, _chained(first, blocks)))
                summary = await self._end(append, run.snapshot, report)
                for task in tasks:
                    task.cancel()
        await append.outlet.finish(_line(summary))

    # ---- in ------------------------------------------------------------------------------------

    async def _text(self, append: _Append) -> AsyncIterator[bytes]:
        """Yield the text as it comes, in pieces that are tokenised one at a time."""
        size = self._context.settings.piece_bytes
        async with contextlib.aclosing(append.source.pieces) as chunks:
            async for chunk in chunks:
                append.text_bytes += len(chunk)
                if append.text_bytes > self._context.settings.body_bytes:
                    raise TooLarge(f"a text may have {self._context.settings.body_bytes} bytes")
                append.content.update(chunk)
                for at in range(0, len(chunk), size):
                    yield chunk[at : at + size]

    async def _pieces(self, append: _Append, run: TextRun, blocks: AsyncIterator[bytes]) -> AsyncGenerator[Piece]:
        """Yield the text's tokens; those that were fed under this key before must be the same.

        Raises: ServiceError (409) for other tokens; ClientGone when the client left in the middle.
        """
        fed, known = append.fed, append.writer.append.position
        try:
            async for piece in self._context.tokeniser.pieces(blocks):
                start = fed.stop
                fed.push(piece.tokens)
                if start < known <= fed.stop and append.writer.append.fed != fed.digest_at(known):
                    raise _another(append)
                yield piece
                run.moved.set()
        except ClientGone:
            append.outlet.gone.set()
            raise
        if fed.stop < known:
            raise _another(append)
        append.read.set()

    # ---- out -----------------------------------------------------------------------------------

    async def _end(self, append: _Append, snapshot: str, report: RestoreReport) -> AppendSummary:
        """Move the session to the last state; return the summary, which is kept for the same request sent again."""
        writer, stop = append.writer, append.fed.stop
        there = [point.position for point in writer.session.checkpoints if point.position < stop]
        summary = AppendSummary(
            session=writer.session.id,
            model=self._context.model.id,
            start=writer.append.start,
            position=stop,
            tokens=stop - writer.append.start,
            checkpoints=[*there, stop][-self._context.settings.store.session_checkpoints :],
            **msgspec.structs.asdict(report),
        )
        await writer.advance(
            Reached(
                stop,
                snapshot,
                done=True,
                result=msgspec.json.encode(summary).decode(),
                fed=append.fed.digest_at(stop),
                digest=append.content.hexdigest(),
            )
        )
        return summary

    async def _tell(self, append: _Append, run: TextRun) -> None:
        """Write lines of progress, only the newest, and one every `ping_seconds` when nothing moves."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._context.settings.ping_seconds):
                    await run.moved.wait()
            run.moved.clear()
            await append.outlet.write(_line(AppendProgress(position=append.fed.stop, kept=append.writer.kept)))
            await asyncio.sleep(BETWEEN_LINES_SECONDS)

    async def _say_again(self, append: _Append) -> None:
        """Answer an append that was done before, once its text is known to be the same."""
        async for _ in self._text(append):
            pass
        known = append.writer.append
        if known.digest and append.content.hexdigest() != known.digest:
            raise _another(append)
        summary = msgspec.json.decode(known.result, type=AppendSummary)
        await append.outlet.start(NDJSON)
        await append.outlet.finish(_line(replace(summary, replayed=True)))


async def _watch(append: _Append) -> None:
    """Notice that the client leaves once its text has come."""
    await append.read.wait()
    await watch(append.source.body, append.outlet.gone)


def _another(append: _Append) -> Conflict:
    known = append.writer.append
    return Conflict(
        f"the key {append.source.key!r} was used for another text, which began at {known.start}; take a new key"
    )


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for block in rest:
        yield block


def _line(value: Answer) -> bytes:
    return msgspec.json.encode(value) + b"\n"
