"""POST /v1/completions: OpenAI's text completion, whole or as an event stream."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.choice_text import told_logprobs
from service.completions import PreparedCompletion
from service.dependencies import Services, read_json_body, record_of, services_of
from service.errors import ClientGone, ServiceError
from service.exchange import RequestBody, ResponseWriter, while_connected
from service.logs import RequestRecord
from service.parsing import parse_json
from service.request_terms import terms_of
from service.schemas import (
    Choice,
    Completion,
    CompletionChunk,
    CompletionRequest,
    CompletionUsage,
    ProgressChunk,
    UsageChunk,
)
from service.streaming import EventWriter, StreamedResponse
from service.whole_completions import complete

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
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
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
    prepared = await services.completions.prepare(wanted)
    prepared = replace(prepared, terms=terms_of(request, wanted))
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
    def counted(usage: CompletionUsage) -> None:
        services.count_completion(record, usage)

    work = complete(services.completions, prepared, services.model.id, record.request_id, counted=counted)
    try:
        with services.open_requests.one():
            answer = await while_connected(body, work)
    except ClientGone:
        record.reason = "client_gone"
        return Response(status_code=499)
    finally:
        work.close()  # where it was not begun
    return Response(answer.model_dump_json(), media_type="application/json")


async def _stream(
    services: Services, prepared: PreparedCompletion, include_usage: bool, writer: ResponseWriter, record: RequestRecord
) -> None:
    head: dict[str, Any] = {"id": prepared.id, "created": prepared.created, "model": services.model.id}

    def chunk(choice: Choice) -> CompletionChunk:
        return CompletionChunk(**head, choices=[choice])

    events = EventWriter(writer, ping_seconds=services.settings.ping_seconds)
    async with services.completions.open(prepared, record.request_id) as run:
        try:
            await events.start()
            while not run.finished:
                delta = await events.alive(run.next())
                if delta.processed is not None:
                    await events.send(ProgressChunk(**head, prompt_progress=run.progress))
                if delta.text or delta.scored:
                    told = told_logprobs(delta.scored, prepared.logprobs) if delta.scored else None
                    await events.send(chunk(Choice(index=delta.index, text=delta.text, logprobs=told)))
                if delta.finish_reason is not None:
                    await events.send(chunk(Choice(index=delta.index, text="", finish_reason=delta.finish_reason)))
            if include_usage:
                await events.send(UsageChunk(**head, usage=run.usage))
        finally:
            services.count_completion(record, run.usage)
    await events.done()
