"""The model goes on with the text of a session: stored state -> engine -> text, and a state into the store."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import msgspec
import numpy as np

from dist_attn.errors import TokenError
from dist_attn.wire.manifest import RestoreReport
from dist_attn.wire.messages import Generated as Drawn
from dist_attn.wire.messages import SamplingSpec, TokenLogprobs
from dist_attn.wire.session_messages import BeginState, Checkpoint, Restored, SessionDone
from dist_attn_service.base.errors import BadRequest, Code, EngineFailure, ServiceError
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.request_terms import RequestTerms
from dist_attn_service.engine.context import ServiceContext
from dist_attn_service.engine.session_stream import SessionStream, SessionWork
from dist_attn_service.http.exchange import task_group
from dist_attn_service.schemas.completions import Choice, CompletionUsage
from dist_attn_service.schemas.sessions import Generated, GenerateSummary
from dist_attn_service.sessions.refusals import NO_RETRY
from dist_attn_service.sessions.writer import SessionWriter, writing
from dist_attn_service.text.choice_text import ChoiceText, ScoredToken, told_logprobs

__all__ = ["GenerateService", "GenerateWork", "TextPiece"]

NO_TOKENS = np.empty(0, dtype=np.int32)
KEPT_CHARACTERS = 16_384  # of an answer that is said again to who sends the same key
FRESH = RestoreReport(0, 0, True, "")
FinishReason = Literal["stop", "length"]


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
    """More text, perhaps none, and how likely its tokens were; `reason` stands on the last piece only."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    reason: FinishReason | None = None


Told = Callable[[TextPiece], None]


@dataclass
class _Run:
    """One generation in the engine."""

    work: GenerateWork
    writer: SessionWriter
    text: ChoiceText
    told: Told
    report: RestoreReport = FRESH
    parts: list[TextPiece] = field(default_factory=list)
    drawn: int = 0  # tokens that are in the text
    reason: FinishReason | None = None
    finishing: bool = False  # the engine was told to draw no further

    def tell(self, piece: TextPiece) -> None:
        """Say it to the client, and keep it for who sends the same key."""
        self.parts.append(piece)
        self.told(piece)

    def finish(self, stream: SessionStream) -> None:
        """Draw no further than what is in the text."""
        if not self.finishing and self.reason is None:
            self.finishing = True
            stream.finish_drawing(self.drawn)


@final
class GenerateService:
    """Generates; holds what all generations share, nothing of any one of them."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def answer(
        self, session_id: str, work: GenerateWork, record: RequestRecord, gone: asyncio.Event, told: Told
    ) -> Generated:
        """Go on with the text of a session; `told` gets an empty piece when it begins, then the text in pieces.

        A client that is `gone` does not end it at once: it goes on for `detached_seconds`, and what is drawn is kept.
        One that was done before under this key is only said again.

        Raises: ServiceError; the session stands where it stood then.
        """
        key = f"generate {work.key}" if work.key else ""
        async with writing(
            self._context.store, record.caller, session_id, key, work.expected_position, digest=work.digest
        ) as writer:
            if writer.done:
                return self._said_again(work, writer, told)
            point = writer.begin
            if point is None:
                raise BadRequest(
                    f"session {session_id} has no text to go on with; append one first", code=Code.EMPTY_INPUT
                )
            await self._context.watch.until_ready()
            self._context.watch.manifest()
            run = _Run(work, writer, ChoiceText(self._context.tokeniser, work.stops), told)
            begin = BeginState(point.position, (await writer.state(point)).size)
            opened = SessionWork(begin, sampling=work.sampling, terms=work.terms.for_engine())
            with self._context.engine.open_session(opened, record.request_id) as stream:
                await stream.admitted(self._context.settings.admission_seconds)
                try:
                    async with task_group() as group:
                        waiting = group.create_task(self._leave(run, stream, gone))
                        await stream.restore(writer.pieces(point))
                        await stream.send(NO_TOKENS, final=True)
                        told(TextPiece())
                        answer = await self._collect(run, stream)
                        waiting.cancel()
                finally:
                    record.note(session=session_id, completion_tokens=run.drawn, position=writer.kept)
                    self._context.metrics.tokens("completion", run.drawn)
            return answer

    async def _leave(self, run: _Run, stream: SessionStream, gone: asyncio.Event) -> None:
        """Draw no further some time after the client has left."""
        await gone.wait()
        await asyncio.sleep(self._context.settings.detached_seconds)
        run.finish(stream)

    async def _collect(self, run: _Run, stream: SessionStream) -> Generated:
        """Drawn tokens as text, and the state after them into the store."""
        last, stands = "", -1
        while True:
            match await stream.next():
                case Restored(report=report):
                    run.report = report
                case Drawn() as event:
                    self._take(run, stream, event)
                case Checkpoint() as checkpoint:
                    stands = checkpoint.position
                    last = await run.writer.keep(stream.snapshot(checkpoint))
                case SessionDone(position=position) if position == stands:
                    return await self._end(run, position, last)
                case event:
                    raise EngineFailure(f"the engine answered a generation with {event!r:.200}")

    def _take(self, run: _Run, stream: SessionStream, event: Drawn) -> None:
        """Text of newly drawn tokens; what comes after a stop string is none of it."""
        scores: Sequence[TokenLogprobs | None] = event.logprobs or [None] * len(event.tokens)
        asked = run.work.sampling.logprobs is not None
        if len(scores) != len(event.tokens) or (asked and event.tokens and not event.logprobs):
            raise EngineFailure(f"the engine sent {len(scores)} log-probabilities with {len(event.tokens)} tokens")
        if run.finishing:
            return
        text = ""
        for token, score in zip(event.tokens, scores, strict=True):
            run.drawn += 1
            try:
                text += run.text.push(token, score)
            except TokenError as error:
                raise EngineFailure(f"the engine drew a token that the tokeniser does not have: {error}") from None
            if run.text.stopped:
                run.finish(stream)
                break
        if text:
            run.tell(TextPiece(text, run.text.take_scored()))
        if event.finish_reason is not None and not run.finishing:
            run.reason = "length" if event.finish_reason == "length" else "stop"

    async def _end(self, run: _Run, position: int, snapshot: str) -> Generated:
        """The last of the text, and what is told now and whenever the same comes again."""
        work, writer = run.work, run.writer
        rest = run.text.finish()
        reason: FinishReason = "stop" if run.text.stopped else run.reason or "length"
        run.tell(TextPiece(rest, run.text.take_scored(), reason))
        text = "".join(part.text for part in run.parts)
        scored = [token for part in run.parts for token in part.scored]
        answer = Generated(
            id=work.id,
            created=work.created,
            model=self._context.model.id,
            choices=[Choice(text=text, logprobs=told_logprobs(scored, work.sampling.logprobs), finish_reason=reason)],
            usage=CompletionUsage(prompt_tokens=0, completion_tokens=run.drawn, total_tokens=run.drawn),
            session=GenerateSummary(
                id=writer.session.id,
                start=writer.append.start,
                position=position,
                **msgspec.structs.asdict(run.report),
            ),
        )
        said = answer.model_dump_json()
        await writer.advance(position, snapshot, done=True, result=said if len(said) <= KEPT_CHARACTERS else "")
        return answer

    def _said_again(self, work: GenerateWork, writer: SessionWriter, told: Told) -> Generated:
        """The answer of a generation that was done before."""
        known = writer.append
        if not known.result:
            raise ServiceError(
                f"this generation was done under the key {work.key!r} and came to position {known.position}; its text "
                "was too long to be kept for a second answer",
                code=Code.CONFLICT,
                headers=NO_RETRY,
                facts={"position": known.position},
            )
        answer = Generated.model_validate_json(known.result)
        session = answer.session.model_copy(update={"replayed": True})
        (choice,) = answer.choices
        told(TextPiece())
        told(TextPiece(choice.text, reason=choice.finish_reason))
        return answer.model_copy(update={"session": session})
