"""The model goes on with the text of a session: stored state -> engine -> text, and a state into the store."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import final

import msgspec
import numpy as np

from dist_attn.store import Reached
from dist_attn.text.base import TokenArray
from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import Checkpoint, Generated, Keep, OpenWork, SamplingSpec
from dist_attn_api.types import Choice, CompletionUsage, Generation, GenerationSummary
from dist_attn_service.base.errors import BadRequest, Code, Conflict
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.tasks import task_group
from dist_attn_service.engine.metrics import DrawingTimes
from dist_attn_service.engine.run import EngineRun, ServiceContext
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.sessions.writer import SessionWriter, writing
from dist_attn_service.text.choice_text import ChoiceText, FinishReason, ScoredToken, choice_logprobs, finish_reason

__all__ = ["GenerateService", "GenerateWork", "TextPiece"]

KEPT_CHARACTERS = 16_384  # of an answer that is kept for the same key sent again


@dataclass(frozen=True)
class GenerateWork:
    """A checked request: how tokens are drawn and what ends them; `digest` tells requests apart."""

    key: str
    expected_position: int | None
    sampling: SamplingSpec
    stops: tuple[str, ...]
    digest: str
    terms: RequestTerms = field(default_factory=RequestTerms)
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class TextPiece:
    """More text, perhaps none, and the scores of its tokens; `reason` stands on the last piece only."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    reason: FinishReason | None = None


OnText = Callable[[TextPiece], None]


@dataclass
class _Run:
    """One generation in the engine."""

    work: GenerateWork
    writer: SessionWriter
    text: ChoiceText
    on_text: OnText
    stream: EngineStream
    times: DrawingTimes
    parts: list[TextPiece] = field(default_factory=list)
    reason: FinishReason | None = None
    finishing: bool = False  # the engine was told to draw no further
    snapshot: str = ""

    def tell(self, piece: TextPiece) -> None:
        """Give a piece to the client, and keep it for the same key sent again."""
        self.parts.append(piece)
        self.on_text(piece)

    def finish(self) -> None:
        """Draw no tokens after those that are in the text."""
        if not self.finishing and self.reason is None:
            self.finishing = True
            self.stream.finish_drawing(self.text.drawn)

    async def on_tokens(self, event: Generated) -> None:
        """Take newly drawn tokens; text after a stop string is dropped."""
        if self.finishing:
            return
        text = self.text.take(event, asked=self.work.sampling.logprobs is not None)
        self.times.drawn(len(event.tokens), ended=self.text.stopped or event.finish_reason is not None)
        if self.text.stopped:
            self.finish()
        if text:
            self.tell(TextPiece(text, self.text.take_scored()))
        if not self.finishing:
            self.reason = finish_reason(event)

    async def on_state(self, state: Checkpoint) -> None:
        """Keep the state after the drawn tokens."""
        self.snapshot = await self.writer.keep(state)


@final
class GenerateService:
    """The service that generates; holds what all generations share, nothing of any one of them."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def answer(
        self, session_id: str, work: GenerateWork, record: RequestRecord, gone: asyncio.Event, on_text: OnText
    ) -> Generation:
        """Go on with the text of a session; `on_text` gets an empty piece when it begins, then the text in pieces.

        A client that is `gone` does not end it at once: it goes on for `detached_seconds`, and what is drawn is kept.
        A generation that was done before under this key is answered from its kept result.

        Raises: ServiceError; the session then keeps its position.
        """
        key = f"generate {work.key}" if work.key else ""
        async with writing(
            self._context.store, record.caller, session_id, key, work.expected_position, digest=work.digest
        ) as writer:
            if writer.done:
                return self._said_again(work, writer, on_text)
            begin = await writer.begin()
            if begin is None:
                raise BadRequest(
                    f"session {session_id} has no text to go on with; append one first", code=Code.EMPTY_INPUT
                )
            await self._context.watch.until_ready()
            self._context.watch.manifest()
            terms = work.terms.for_engine()
            opened = OpenWork(record.request_id, begin, draw=work.sampling, keep=Keep(end=True), terms=terms)
            async with self._context.open(opened, await writer.maker(self._context)) as stream:
                text, times = ChoiceText(self._context.tokeniser, work.stops), DrawingTimes(self._context.metrics)
                run = _Run(work, writer, text, on_text, stream, times)
                return await self._work(run, record, gone)

    async def _work(self, run: _Run, record: RequestRecord, gone: asyncio.Event) -> Generation:
        engine = EngineRun(run.stream, on_tokens=run.on_tokens, on_state=run.on_state)
        try:
            async with task_group() as group:
                waiting = group.create_task(self._leave(run, gone))
                await engine.work(_begun(run))
                assert engine.kept is not None  # the end says so
                answer = await self._end(run, engine.kept, engine.report)
                waiting.cancel()
            return answer
        finally:
            drawn = run.text.drawn
            record.note(session=run.writer.session.id, completion_tokens=drawn, position=run.writer.kept)
            self._context.metrics.tokens("completion", drawn)

    async def _leave(self, run: _Run, gone: asyncio.Event) -> None:
        """Draw no further some time after the client has left."""
        await gone.wait()
        await asyncio.sleep(self._context.settings.detached_seconds)
        run.finish()

    async def _end(self, run: _Run, position: int, report: RestoreReport) -> Generation:
        """End the text, and return the answer, which is kept for the same request sent again."""
        work, writer = run.work, run.writer
        rest = run.text.finish()
        reason: FinishReason = "stop" if run.text.stopped else run.reason or "length"
        run.tell(TextPiece(rest, run.text.take_scored(), reason))
        text = "".join(part.text for part in run.parts)
        scored = [token for part in run.parts for token in part.scored]
        answer = Generation(
            id=work.id,
            created=work.created,
            model=self._context.model.id,
            choices=[Choice(text=text, logprobs=choice_logprobs(scored, work.sampling.logprobs), finish_reason=reason)],
            usage=CompletionUsage(prompt_tokens=0, completion_tokens=run.text.drawn, total_tokens=run.text.drawn),
            session=GenerationSummary(
                id=writer.session.id,
                start=writer.append.start,
                position=position,
                **msgspec.structs.asdict(report),
            ),
        )
        said = msgspec.json.encode(answer).decode()
        await writer.advance(
            Reached(position, run.snapshot, done=True, result=said if len(said) <= KEPT_CHARACTERS else "")
        )
        return answer

    def _said_again(self, work: GenerateWork, writer: SessionWriter, on_text: OnText) -> Generation:
        """The answer of a generation that was done before."""
        known = writer.append
        if not known.result:
            raise Conflict(
                f"this generation was done under the key {work.key!r} and came to position {known.position}; its text "
                "was too long to be kept for a second answer",
                facts={"position": known.position},
            )
        answer = msgspec.json.decode(known.result, type=Generation)
        (choice,) = answer.choices
        on_text(TextPiece())
        on_text(TextPiece(choice.text, reason=choice.finish_reason))
        return replace(answer, session=replace(answer.session, replayed=True))


async def _begun(run: _Run) -> AsyncGenerator[TokenArray]:
    """Yield no tokens, and begin the answer once the engine has the state to go on from."""
    await run.stream.restored()
    run.on_text(TextPiece())
    yield np.empty(0, dtype=np.int32)
