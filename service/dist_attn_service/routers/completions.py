"""OpenAI's /v1/completions and /v1/chat/completions, whole or as an event stream; the two differ in form only."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, final

from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import Choice, Completion, CompletionUsage
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.completions.prepared import PreparedCompletion, prepare
from dist_attn_service.completions.run import Delta, Gathered, whole_completion
from dist_attn_service.completions.tool_calls import CallScanner, WholeScanner
from dist_attn_service.dependencies import ModelServices
from dist_attn_service.http.exchange import EventWriter, ResponseWriter, while_connected
from dist_attn_service.routers.incoming import Asked, Incoming, json_response
from dist_attn_service.routers.openapi import described, events
from dist_attn_service.schemas.completions import (
    AnswerOptions,
    AssistantMessage,
    CallingMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChatToken,
    CompletionRequest,
    LikelyToken,
    StreamOptions,
    ToolCall,
)
from dist_attn_service.text.choice_text import FinishReason, ScoredToken, choice_logprobs

router = APIRouter()
RAW = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


@router.post(
    "/v1/completions",
    tags=["completions"],
    response_model=Completion,
    summary="Complete texts",
    openapi_extra=described(
        CompletionRequest, answers=events("The whole completion; with `stream`, its pieces as server-sent events.")
    ),
)
async def create_completion(asked: Asked) -> Response:
    """Continue one or more prompts; with `stream` as server-sent events."""
    wanted = await asked.json(CompletionRequest)
    served = asked.services.context_for(wanted.model, "completions")
    prepared = await prepare(served, wanted, asked.terms(wanted), asked.caller)
    return await send_answer(asked, _CompletionForm(prepared, served), wanted)


@router.post(
    "/v1/chat/completions",
    tags=["chat"],
    response_model=ChatCompletion,
    summary="Answer a chat",
    openapi_extra=described(
        ChatRequest, answers=events("The whole answer; with `stream`, its pieces as server-sent events.")
    ),
)
async def create_chat_completion(asked: Asked) -> Response:
    """Write what the assistant says next, by the model's chat template; with `stream` as server-sent events."""
    wanted = await asked.json(ChatRequest)
    served = asked.services.context_for(wanted.model, "completions")
    prepared = await served.chat.prepare(wanted, asked.terms(wanted), asked.caller)
    return await send_answer(asked, _ChatForm(prepared, served), wanted)


# ---- in any form ---------------------------------------------------------------------------------


class AnswerForm(ABC):
    """The JSON of one route: its events, and its whole answer."""

    event_object = "text_completion"

    def __init__(self, prepared: PreparedCompletion, served: ModelServices) -> None:
        self.prepared = prepared
        self.completions = served.completions
        self.model = served.model.id

    def event(self, choices: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """An event: more of some choices, and those of the other members that are not None."""
        extra = {name: value for name, value in more.items() if value is not None}
        head = {"id": self.prepared.id, "object": self.event_object, "created": self.prepared.created}
        return {**head, "model": self.model, "choices": choices, **extra}

    def openings(self) -> Iterable[Any]:
        """The choices of the events before any text."""
        return ()

    @abstractmethod
    def pieces(self, delta: Delta) -> Iterable[Any]:
        """The event members for more text of a choice, and for its end."""

    def closings(self, usage: CompletionUsage) -> Iterable[Any]:
        """The event members after all text."""
        return ()

    @abstractmethod
    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> Any:
        """The whole answer."""


async def send_answer(asked: Incoming, form: AnswerForm, wanted: AnswerOptions) -> Response:
    """Answer a checked request, whole or as a stream.

    Raises: ServiceError as long as nothing has been sent; afterwards it is the last event.
    """
    prepared = form.prepared
    asked.record.note(
        completion_id=prepared.id,
        prompt_tokens=prepared.prompt_tokens,
        choices=len(prepared.choices),
        stream=bool(wanted.stream),
    )
    if not wanted.stream:
        return await _whole(asked, form)
    options = wanted.stream_options or StreamOptions()
    return asked.streamed(
        lambda writer: while_connected(asked.body, _stream(asked, form, options, writer)), ServiceError.events
    )


async def _whole(asked: Incoming, form: AnswerForm) -> Response:
    services, record = asked.services, asked.record
    counted = partial(services.count_completion, record)
    work = form.completions.gather(form.prepared, record.request_id, counted=counted)
    try:
        with asked.place():
            choices, usage = await while_connected(asked.body, work)
    finally:
        work.close()  # if it was never begun
    return json_response(form.whole(choices, usage))


async def _stream(asked: Incoming, form: AnswerForm, options: StreamOptions, writer: ResponseWriter) -> None:
    services, record = asked.services, asked.record
    sse = EventWriter(writer, ping_seconds=services.settings.ping_seconds)
    async with form.completions.open(form.prepared, record.request_id) as run:

        async def send(choice: Any) -> None:
            """Send an event, with the usage so far where that was asked for."""
            await sse.send(form.event([choice], usage=run.usage if options.continuous_usage_stats else None))

        try:
            await sse.start()
            for choice in form.openings():
                await send(choice)
            while not run.finished:
                delta = await sse.alive(run.next())
                if delta.processed is not None:
                    await sse.send(form.event(prompt_progress=run.progress))
                for piece in form.pieces(delta):
                    await send(piece)
            for last in form.closings(run.usage):
                await send(last)
            if options.include_usage:
                await sse.send(form.event(usage=run.usage))
        finally:
            services.count_completion(record, run.usage)
    await sse.done()


# ---- the two forms -------------------------------------------------------------------------------


@final
class _CompletionForm(AnswerForm):
    def pieces(self, delta: Delta) -> Iterable[Choice]:
        if delta.text or delta.scored:
            logprobs = choice_logprobs(delta.scored, self.prepared.logprobs) if delta.scored else None
            yield Choice(index=delta.index, text=delta.text, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield Choice(index=delta.index, text="", finish_reason=delta.finish_reason)

    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> Completion:
        return whole_completion(self.prepared, self.model, choices, usage)


class CallingForm(AnswerForm):
    """The part of forms that take calls of tools out of texts."""

    def __init__(self, prepared: PreparedCompletion, served: ModelServices) -> None:
        super().__init__(prepared, served)
        self._scanners: dict[int, CallScanner | WholeScanner] = {}

    def _found(self, index: int) -> int:
        """The number of calls of a choice so far."""
        return self._scanners[index].found

    def _taken_apart(
        self, index: int, text: str, reason: FinishReason | None
    ) -> tuple[str, list[ToolCall], FinishReason | Literal["tool_calls"] | None]:
        """The text without the calls in it, the calls, and why the answer has ended."""
        reading = self.prepared.calls
        if reading is None:
            return text, [], reason
        name = f"{self.prepared.id.removeprefix('chatcmpl-')}_{index}"
        scanner = self._scanners.setdefault(index, reading.scanner(name))
        before = scanner.found
        text, calls = scanner.push(text)
        if reason is not None:
            rest, more = scanner.finish()
            text, calls = text + rest, calls + more
        if reading.alone and scanner.found:  # what follows the first call is left out
            text, calls, scanner.found = "" if before else text, calls[: 1 - before], 1
        return text, calls, "tool_calls" if scanner.found and reason == "stop" else reason


@final
class _ChatForm(CallingForm):
    event_object = "chat.completion.chunk"

    def openings(self) -> Iterable[ChatChunkChoice]:
        role = {"role": "assistant", "content": ""}
        return [ChatChunkChoice(index=planned.index, delta=role) for planned in self.prepared.choices]

    def pieces(self, delta: Delta) -> Iterable[ChatChunkChoice]:
        text, calls, reason = self._taken_apart(delta.index, delta.text, delta.finish_reason)
        if text or calls or delta.scored:
            more: dict[str, Any] = {"content": text} if text or not calls else {}
            if calls:
                first = self._found(delta.index) - len(calls)
                more["tool_calls"] = [{"index": first + at, **vars(call)} for at, call in enumerate(calls)]
            logprobs = _logprobs(delta.scored, self.prepared.logprobs) if delta.scored else None
            yield ChatChunkChoice(index=delta.index, delta=more, logprobs=logprobs)
        if reason is not None:
            yield ChatChunkChoice(index=delta.index, delta={}, finish_reason=reason)

    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> ChatCompletion:
        return ChatCompletion(
            id=self.prepared.id,
            created=self.prepared.created,
            model=self.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )

    def _choice(self, index: int, choice: Gathered) -> ChatChoice:
        text, calls, reason = self._taken_apart(index, choice.text, choice.finish_reason or "stop")
        calling = CallingMessage(content=text.strip() or None, tool_calls=calls)
        return ChatChoice(
            index=index,
            message=calling if calls else AssistantMessage(content=text),
            logprobs=_logprobs(choice.scored, self.prepared.logprobs),
            finish_reason=reason or "stop",
        )


def _logprobs(scored: Sequence[ScoredToken], asked: int | None) -> ChatLogprobs | None:
    if asked is None:
        return None
    return ChatLogprobs(
        content=[
            ChatToken(
                token=token.text,
                logprob=token.logprob,
                bytes=_bytes(token.text),
                # the drawn token may follow the likeliest ones; only as many as were asked for are sent
                top_logprobs=[
                    LikelyToken(token=text, logprob=value, bytes=_bytes(text))
                    for text, value in list((token.top or {}).items())[:asked]
                ],
            )
            for token in scored
        ]
    )


def _bytes(text: str) -> list[int]:
    """The bytes of a token, which may be no whole character."""
    raw = RAW.fullmatch(text)
    return list(bytes.fromhex(raw[1].replace("\\x", ""))) if raw else list(text.encode())
