"""POST /v1/completions: OpenAI's text completion, whole or as an event stream."""

from typing import final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.parsing import parse_json, terms_of
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.completions.run import Delta
from dist_attn_service.completions.whole import Gathered, whole_completion
from dist_attn_service.dependencies import read_json_body, record_of, services_of
from dist_attn_service.routers.answering import AnswerForm, answer
from dist_attn_service.schemas.completions import (
    Choice,
    Completion,
    CompletionChunk,
    CompletionRequest,
    CompletionUsage,
    ProgressChunk,
    PromptProgress,
    UsageChunk,
)
from dist_attn_service.text.choice_text import choice_logprobs

__all__ = ["router"]

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    summary="Complete texts",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}},
        },
        "responses": {
            "200": {
                "description": "The whole completion; with `stream`, its pieces as server-sent events.",
                "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/ServerSentEvent"}}},
            }
        },
    },
)
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts; with `stream` as server-sent events."""
    services, record = services_of(request), record_of(request)
    body = services.body(request)
    wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), CompletionRequest)
    services.check_model(wanted.model)
    services.check_writes()
    prepared = await prepare(services, wanted, terms_of(request, wanted), record.caller)
    form = _CompletionForm(prepared, services.model.id)
    return await answer(services, form, body, record, stream=wanted.stream, options=wanted.stream_options)


@final
class _CompletionForm(AnswerForm):
    def text(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        told = choice_logprobs(delta.scored, self.prepared.logprobs) if delta.scored else None
        return self._chunk(Choice(index=delta.index, text=delta.text, logprobs=told), usage)

    def end(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        return self._chunk(Choice(index=delta.index, text="", finish_reason=delta.finish_reason), usage)

    def progress(self, progress: PromptProgress) -> BaseModel:
        return ProgressChunk(**self.head, prompt_progress=progress)

    def usage(self, usage: CompletionUsage) -> BaseModel:
        return UsageChunk(**self.head, usage=usage)

    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> BaseModel:
        return whole_completion(self.prepared, self.head["model"], choices, usage)

    def _chunk(self, choice: Choice, usage: CompletionUsage | None) -> BaseModel:
        if usage is not None:
            return UsageChunk(**self.head, choices=[choice], usage=usage)
        return CompletionChunk(**self.head, choices=[choice])
