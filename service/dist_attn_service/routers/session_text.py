"""/v1/sessions/{id}/append and /generate: text into a session, and text out of it; both become a part of it."""

import asyncio
import hashlib
import json

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import BadRequest, ClientGone, Code, ServiceError, TooLarge
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.base.parsing import parse_drawing, parse_json, parse_query, terms_of, utf8
from dist_attn_service.base.tasks import task_group
from dist_attn_service.dependencies import Services, media_type, read_json_body, read_options, record_of, services_of
from dist_attn_service.http.exchange import EventWriter, RequestBody, ResponseWriter, StreamedResponse
from dist_attn_service.schemas.completions import Choice
from dist_attn_service.schemas.sessions import (
    AppendOptions,
    AppendRequest,
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
    Generation,
)
from dist_attn_service.sessions.answers import Outlet, idempotency_key
from dist_attn_service.sessions.append import AppendSource
from dist_attn_service.sessions.generate import GenerateWork, TextPiece
from dist_attn_service.text.choice_text import choice_logprobs

__all__ = ["router"]

router = APIRouter(tags=["sessions"])
BYTES, TEXT = "application/octet-stream", "text/plain"
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[!#-~]{1,256}$"},
}
NO_PART_OF_IT = {"stream", "user", "priority", "deadline_seconds"}
"""What may differ in a request that is sent again under the same key."""


@router.post(
    "/v1/sessions/{session_id}/append",
    summary="Append a text to a session",
    response_class=Response,
    openapi_extra={
        "parameters": [
            {
                "name": "expected_position",
                "in": "query",
                "required": False,
                "schema": {"type": "integer", "minimum": 0, "maximum": 1 << 53},
            },
            IDEMPOTENCY_KEY,
        ],
        "requestBody": {
            "required": True,
            "content": {
                TEXT: {"schema": {"type": "string"}},
                BYTES: {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"$ref": "#/components/schemas/AppendRequest"}},
            },
        },
        "responses": {
            "200": {
                "description": "One JSON object per line: progress, then a summary or an error.",
                "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
            }
        },
    },
)
async def append_text(request: Request, session_id: str) -> Response:
    """Read a text of any length into a session while it is still being sent, each part of it once."""
    services, record = services_of(request), record_of(request)
    services.check_writes()
    body = services.body(request)
    source = await _appended(request, services, body)

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await services.sessions.appends.answer(session_id, source, writer, record)

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=ServiceError.line,
        stall_seconds=services.settings.client_stall_seconds,
    )


@router.post(
    "/v1/sessions/{session_id}/generate",
    response_model=Generation,
    summary="Go on with the text of a session",
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/GenerateRequest"}}},
        },
        "parameters": [IDEMPOTENCY_KEY],
        "responses": {
            "200": {
                "description": "The whole text; with `stream`, its pieces as server-sent events.",
                "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/ServerSentEvent"}}},
            }
        },
    },
)
async def generate(request: Request, session_id: str) -> Response:
    """Draw tokens after the text of a session; they become a part of it, whether or not the client stays."""
    services, record = services_of(request), record_of(request)
    body = services.body(request)
    data = await read_options(request, body)
    wanted = parse_json(data, GenerateRequest)
    services.check_model(wanted.model)
    services.check_writes()
    spec, stops = parse_drawing(
        wanted,
        services.settings,
        services.tokeniser.vocab_size,
        max_tokens=wanted.max_tokens,
        logprobs=wanted.logprobs,
    )
    work = GenerateWork(
        idempotency_key(request.headers),
        wanted.expected_position,
        spec,
        stops,
        _digest(wanted),
        terms_of(request, wanted),
    )
    record.note(completion_id=work.id, stream=bool(wanted.stream))
    if not wanted.stream:
        with services.open_requests.one(record.holder):
            answer = await _whole(services, session_id, work, body, record)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await _stream(services, session_id, work, body, record, Outlet(writer))

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=ServiceError.events,
        stall_seconds=services.settings.client_stall_seconds,
    )


def _digest(wanted: GenerateRequest) -> str:
    """What tells requests under one key apart; neither the order of options nor those that nobody has named count."""
    options = wanted.model_dump(exclude=NO_PART_OF_IT, exclude_none=True)
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


async def _stream(
    services: Services, session_id: str, work: GenerateWork, body: RequestBody, record: RequestRecord, outlet: Outlet
) -> None:
    # Bounded by what may be drawn: a client that does not read does not hold the drawing up.
    pieces: asyncio.Queue[TextPiece | None] = asyncio.Queue()
    events = EventWriter(outlet, ping_seconds=services.settings.ping_seconds)

    def chunk(piece: TextPiece) -> GenerateChunk:
        told = choice_logprobs(piece.scored, work.sampling.logprobs) if piece.scored else None
        choice = Choice(text=piece.text, logprobs=told, finish_reason=piece.reason)
        return GenerateChunk(id=work.id, created=work.created, model=services.model.id, choices=[choice])

    async with task_group() as group:
        watching = group.create_task(outlet.watch(body))
        generation = services.sessions.generations
        task = group.create_task(generation.answer(session_id, work, record, outlet.gone, pieces.put_nowait))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        if await pieces.get() is not None:
            await events.start()
            while (piece := await events.alive(pieces.get())) is not None:
                if piece.text or piece.reason:
                    await events.send(chunk(piece))
        answer = await task
        watching.cancel()
    await events.send(GenerateEnd(**answer.model_dump(exclude={"object", "choices"})))
    await events.done()


async def _whole(
    services: Services, session_id: str, work: GenerateWork, body: RequestBody, record: RequestRecord
) -> Generation:
    """The whole answer; a client that leaves does not end the work at once."""
    gone = asyncio.Event()

    async def watch() -> None:
        try:
            await body.until_gone()
        except ClientGone:
            record.reason = "client_gone"
            gone.set()

    async with task_group() as group:
        watching = group.create_task(watch())
        answer = await services.sessions.generations.answer(session_id, work, record, gone, lambda _: None)
        watching.cancel()
    return answer


async def _appended(request: Request, services: Services, body: RequestBody) -> AppendSource:
    """What is appended, and where: query and JSON together."""
    options = parse_query(request.query_params.multi_items(), AppendOptions)
    key, kind = idempotency_key(request.headers), media_type(request)
    if kind == "application/json":
        data = await read_json_body(request, body, services.settings.json_body_bytes)
        wanted = parse_json(data, AppendRequest)
        expected = wanted.expected_position
        if expected is not None and options.expected_position not in (None, expected):
            raise BadRequest(
                f"expected_position is {options.expected_position} in the query and {expected} in the body",
                param="expected_position",
            )
        text = utf8(wanted.input, "input", "input")
        if not text:
            raise BadRequest("input is empty; send a text", code=Code.EMPTY_INPUT, param="input")
        at = options.expected_position if expected is None else expected
        return AppendSource(body, key, at, text, terms=terms_of(request, wanted))
    if kind not in (TEXT, BYTES, ""):
        raise ServiceError(
            f"Content-Type is {kind[:80]!r}; send -H 'Content-Type: {TEXT}' (UTF-8), {BYTES} (any bytes) or "
            "application/json",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )
    limit, length = services.settings.body_bytes, request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise TooLarge(f"the body has {length} bytes; a text may have {limit}")
    return AppendSource(body, key, options.expected_position, check_utf8=kind == TEXT, terms=terms_of(request))
