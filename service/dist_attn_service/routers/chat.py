"""POST /v1/chat/completions: OpenAI's chat completion, whole or as an event stream."""

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.parsing import parse_json, terms_of
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.completions.run import Delta
from dist_attn_service.completions.whole import Gathered
from dist_attn_service.dependencies import read_json_body, record_of, services_of
from dist_attn_service.routers.answering import AnswerForm, answer
from dist_attn_service.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatProgressChunk,
    ChatRequest,
    ChatToken,
    ChatUsageChunk,
    LikelyToken,
)
from dist_attn_service.schemas.completions import CompletionUsage, PromptProgress
from dist_attn_service.text.choice_text import ScoredToken

__all__ = ["router"]

router = APIRouter(tags=["chat"])
RAW = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    summary="Answer a chat",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}},
        },
        "responses": {
            "200": {
                "description": "The whole answer; with `stream`, its pieces as server-sent events.",
                "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/ServerSentEvent"}}},
            }
        },
    },
)
async def create_chat_completion(request: Request) -> Response:
    """Write what the assistant says next, by the model's chat template; with `stream` as server-sent events."""
    services, record = services_of(request), record_of(request)
    body = services.body(request)
    wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), ChatRequest)
    services.check_model(wanted.model)
    services.check_writes()
    completion = await services.chat.as_completion(wanted)
    prepared = replace(
        await prepare(services, completion, terms_of(request, wanted), record.caller), id=f"chatcmpl-{uuid.uuid4().hex}"
    )
    form = _ChatForm(prepared, services.model.id)
    return await answer(services, form, body, record, stream=wanted.stream, options=wanted.stream_options)


@final
class _ChatForm(AnswerForm):
    def opening(self, usage: CompletionUsage | None) -> Iterable[BaseModel]:
        role = {"role": "assistant", "content": ""}
        choices = [ChatChunkChoice(index=planned.index, delta=role) for planned in self.prepared.choices]
        return [self._chunk(choice, usage) for choice in choices]

    def text(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        told = _logprobs(delta.scored, self.prepared.logprobs) if delta.scored else None
        return self._chunk(ChatChunkChoice(index=delta.index, delta={"content": delta.text}, logprobs=told), usage)

    def end(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        return self._chunk(ChatChunkChoice(index=delta.index, delta={}, finish_reason=delta.finish_reason), usage)

    def progress(self, progress: PromptProgress) -> BaseModel:
        return ChatProgressChunk(**self.head, prompt_progress=progress)

    def usage(self, usage: CompletionUsage) -> BaseModel:
        return ChatUsageChunk(**self.head, usage=usage)

    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> BaseModel:
        return ChatCompletion(
            **self.head,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(content=choice.text),
                    logprobs=_logprobs(choice.scored, self.prepared.logprobs),
                    finish_reason=choice.finish_reason or "stop",
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
        )

    def _chunk(self, choice: ChatChunkChoice, usage: CompletionUsage | None) -> BaseModel:
        if usage is not None:
            return ChatUsageChunk(**self.head, choices=[choice], usage=usage)
        return ChatChunk(**self.head, choices=[choice])


def _logprobs(scored: Sequence[ScoredToken], asked: int | None) -> ChatLogprobs | None:
    if asked is None:
        return None
    return ChatLogprobs(
        content=[
            ChatToken(
                token=token.text,
                logprob=token.logprob,
                bytes=_bytes(token.text),
                # the drawn token may stand behind the likeliest ones; here there are as many as were asked for
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
