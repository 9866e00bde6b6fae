"""POST /v1/completions: OpenAI's text completion, whole or as an event stream."""

from math import inf
from statistics import fmean

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.choice_text import told_logprobs
from service.completions import CompletionRun, Delta, PreparedCompletion
from service.dependencies import Services, read_json_body, record_of, services_of
from service.errors import ClientGone, ServiceError
from service.exchange import RequestBody, ResponseWriter, while_connected
from service.logs import RequestRecord
from service.parsing import parse_json
from service.schemas import Choice, Completion, CompletionChunk, CompletionRequest, UsageChunk
from service.streaming import EventWriter, StreamedResponse

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
    choices = [_Gathered(prepared.logprobs) for _ in prepared.choices]

    async def work() -> CompletionRun:
        async with services.completions.open(prepared, record.request_id) as run:
            try:
                while not run.finished:
                    delta = await run.next()
                    choices[delta.index].add(delta)
                return run
            finally:
                services.count_completion(record, run.usage)

    try:
        with services.open_requests.one():
            run = await while_connected(body, work())
    except ClientGone:
        record.reason = "client_gone"
        return Response(status_code=499)
    answer = Completion(
        id=prepared.id,
        created=prepared.created,
        model=services.model.id,
        choices=[choice.whole(index) for index, choice in enumerate(_best(prepared, choices))],
        usage=run.usage,
    )
    return Response(answer.model_dump_json(), media_type="application/json")


class _Gathered:
    """What has come of one choice."""

    def __init__(self, logprobs: int | None) -> None:
        self._logprobs = logprobs
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    @property
    def score(self) -> float:
        """The mean log-probability of its tokens; a text without any is the worst."""
        values = [token.logprob for delta in self._deltas for token in delta.scored]
        return fmean(values) if values else -inf

    def whole(self, index: int) -> Choice:
        scored = [token for delta in self._deltas for token in delta.scored]
        return Choice(
            index=index,
            text="".join(delta.text for delta in self._deltas),
            logprobs=told_logprobs(scored, self._logprobs),
            finish_reason=self._deltas[-1].finish_reason,
        )


def _best(prepared: PreparedCompletion, choices: list[_Gathered]) -> list[_Gathered]:
    """Of each prompt's choices the wanted number; where more were drawn, the likeliest first."""
    drawn = len(choices) // len(prepared.prompts)
    if drawn == prepared.wanted:
        return choices
    groups = [choices[at : at + drawn] for at in range(0, len(choices), drawn)]
    return [
        choice
        for group in groups
        for choice in sorted(group, key=lambda choice: choice.score, reverse=True)[: prepared.wanted]
    ]


async def _stream(
    services: Services, prepared: PreparedCompletion, include_usage: bool, writer: ResponseWriter, record: RequestRecord
) -> None:
    model = services.model.id

    def chunk(choice: Choice) -> CompletionChunk:
        return CompletionChunk(id=prepared.id, created=prepared.created, model=model, choices=[choice])

    events = EventWriter(writer, ping_seconds=services.settings.ping_seconds)
    async with services.completions.open(prepared, record.request_id) as run:
        try:
            await events.start()
            while not run.finished:
                delta = await events.alive(run.next())
                if delta.text or delta.scored:
                    told = told_logprobs(delta.scored, prepared.logprobs) if delta.scored else None
                    await events.send(chunk(Choice(index=delta.index, text=delta.text, logprobs=told)))
                if delta.finish_reason is not None:
                    await events.send(chunk(Choice(index=delta.index, text="", finish_reason=delta.finish_reason)))
            if include_usage:
                await events.send(UsageChunk(id=prepared.id, created=prepared.created, model=model, usage=run.usage))
        finally:
            services.count_completion(record, run.usage)
    await events.done()
