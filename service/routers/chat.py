"""POST /v1/chat/completions: OpenAI's chat completion, whole or as an event stream."""

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.chat_schemas import (
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
from service.choice_text import ScoredToken
from service.completions import CompletionRun, Delta, PreparedCompletion
from service.dependencies import Services, read_json_body, record_of, services_of
from service.errors import ClientGone, ServiceError
from service.exchange import RequestBody, ResponseWriter, while_connected
from service.logs import RequestRecord
from service.parsing import parse_json
from service.request_terms import terms_of
from service.streaming import EventWriter, StreamedResponse

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
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
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
    prepared = await services.completions.prepare(await services.chat.as_completion(wanted))
    prepared = replace(prepared, id=f"chatcmpl-{uuid.uuid4().hex}", terms=terms_of(request, wanted))
    record.note(
        completion_id=prepared.id,
        prompt_tokens=prepared.prompt_tokens,
        choices=len(prepared.choices),
        stream=bool(wanted.stream),
    )
    if not wanted.stream:
        return await _whole(services, prepared, body, record)
    include_usage = wanted.stream_options is not None and bool(wanted.stream_options.include_usage)

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one():
            await while_connected(body, _stream(services, prepared, include_usage, writer, record))

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=ServiceError.events,
        stall_seconds=services.settings.client_stall_seconds,
    )


async def _whole(
    services: Services, prepared: PreparedCompletion, body: RequestBody, record: RequestRecord
) -> Response:
    deltas: list[list[Delta]] = [[] for _ in prepared.choices]

    async def work() -> CompletionRun:
        async with services.completions.open(prepared, record.request_id) as run:
            try:
                while not run.finished:
                    delta = await run.next()
                    deltas[delta.index].append(delta)
                return run
            finally:
                services.count_completion(record, run.usage)

    try:
        with services.open_requests.one():
            run = await while_connected(body, work())
    except ClientGone:
        record.reason = "client_gone"
        return Response(status_code=499)
    answer = ChatCompletion(
        id=prepared.id,
        created=prepared.created,
        model=services.model.id,
        choices=[_choice(index, of_choice, prepared.logprobs) for index, of_choice in enumerate(deltas)],
        usage=run.usage,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _choice(index: int, deltas: list[Delta], asked: int | None) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AssistantMessage(content="".join(delta.text for delta in deltas)),
        logprobs=_logprobs([token for delta in deltas for token in delta.scored], asked),
        finish_reason=deltas[-1].finish_reason or "stop",
    )


async def _stream(
    services: Services, prepared: PreparedCompletion, include_usage: bool, writer: ResponseWriter, record: RequestRecord
) -> None:
    head: dict[str, Any] = {"id": prepared.id, "created": prepared.created, "model": services.model.id}
    events = EventWriter(writer, ping_seconds=services.settings.ping_seconds)

    async def send(choice: ChatChunkChoice) -> None:
        await events.send(ChatChunk(**head, choices=[choice]))

    async with services.completions.open(prepared, record.request_id) as run:
        try:
            await events.start()
            for planned in prepared.choices:
                await send(ChatChunkChoice(index=planned.index, delta={"role": "assistant", "content": ""}))
            while not run.finished:
                delta = await events.alive(run.next())
                if delta.processed is not None:
                    await events.send(ChatProgressChunk(**head, prompt_progress=run.progress))
                if delta.text or delta.scored:
                    told = _logprobs(delta.scored, prepared.logprobs) if delta.scored else None
                    await send(ChatChunkChoice(index=delta.index, delta={"content": delta.text}, logprobs=told))
                if delta.finish_reason is not None:
                    await send(ChatChunkChoice(index=delta.index, delta={}, finish_reason=delta.finish_reason))
            if include_usage:
                await events.send(ChatUsageChunk(**head, usage=run.usage))
        finally:
            services.count_completion(record, run.usage)
    await events.done()


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
                    for text, value in list(token.top.items())[:asked]
                ],
            )
            for token in scored
        ]
    )


def _bytes(text: str) -> list[int]:
    """The bytes of a token, which may be no whole character."""
    raw = RAW.fullmatch(text)
    return list(bytes.fromhex(raw[1].replace("\\x", ""))) if raw else list(text.encode())
