"""/v1/jobs: work that goes on without its client, found again by its id."""

import re
import secrets
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.base.parsing import parse_json, parse_query, refuse, terms_of
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.dependencies import Services, media_type, read_json_body, record_of, services_of
from dist_attn_service.encodings.formats import FORMATS, choose_format
from dist_attn_service.http.exchange import RequestBody, ResponseWriter, StreamedResponse, while_connected
from dist_attn_service.jobs.record import JobRecord
from dist_attn_service.jobs.results import ResultWanted
from dist_attn_service.routers.document_bodies import (
    DOCUMENTS,
    JSON,
    document_source,
    named_source,
    no_error_trailer,
    query_parameters,
)
from dist_attn_service.schemas.completions import CompletionRequest, EncodingOptions
from dist_attn_service.schemas.jobs import EventOptions, Job, JobList, JobRequest, ListJobs, ResultOptions

__all__ = ["job_response", "router"]

router = APIRouter(tags=["jobs"])
EVENT_STREAM = "text/event-stream; charset=utf-8"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_JOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    202: {"model": Job, "description": "The job, which has begun or waits."}
}


@router.post(
    "/v1/jobs",
    summary="Hand in work that outlives the connection",
    status_code=202,
    responses=_JOB_ANSWERS,
    response_class=Response,
    openapi_extra={
        "parameters": query_parameters(EncodingOptions, leave_out=("format", "from_row")),
        "requestBody": {
            "required": True,
            "content": {
                **DOCUMENTS,
                JSON: {"schema": {"$ref": "#/components/schemas/JobRequest"}},
            },
        },
    },
)
async def create_job(request: Request) -> Response:
    """An encoding of the body (with the query of /v1/encodings), or what a JSON body asks for; 202 with the job."""
    services, record = services_of(request), record_of(request)
    body = services.body(request)
    if media_type(request, gzip=True) != JSON:
        options = parse_query(request.query_params.multi_items(), EncodingOptions)
        _refuse_format(options)
        services.check_model(options.model)
        source = document_source(request, services, body)
        with services.open_requests.one(record.holder):
            rows = services.rows(options)
            made = await services.jobs.api.encoding(record.caller, rows, source.chunks(), source.size)
        return await job_response(services, *made)
    wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), JobRequest)
    services.check_model(wanted.model)
    with services.open_requests.one(record.holder):
        if wanted.completion is not None:
            return await job_response(services, *await _completion(services, request, wanted))
        return await job_response(services, *await _encoding(services, record.caller, wanted))


async def _encoding(services: Services, caller: str, wanted: JobRequest) -> tuple[str, JobRecord]:
    """The text, or the file, is copied to the job's own: a file may be deleted once the job is made."""
    if wanted.input is None and wanted.file_id is None:
        raise BadRequest("send input, file_id or completion", code=Code.MISSING_PARAMETER, param="input")
    named = {
        name: getattr(wanted, name) for name in ("granularity", "window", "pooling") if name in wanted.model_fields_set
    }
    spec = services.rows(EncodingOptions.model_validate({k: v for k, v in named.items() if v is not None}))
    source = await named_source(services, caller, wanted.input, wanted.file_id)
    return await services.jobs.api.encoding(caller, spec, source.chunks(), source.size)


async def _completion(services: Services, asked: Request, wanted: JobRequest) -> tuple[str, JobRecord]:
    """A completion is checked now, as far as it can be without the engine."""
    for name in ("input", "file_id", "granularity", "window", "pooling"):
        if getattr(wanted, name) is not None:
            raise BadRequest(f"{name} and completion were given; a job is one of the two", param=name)
    services.check_writes()
    try:
        request = CompletionRequest.model_validate(wanted.completion)
    except ValidationError as error:
        raise refuse(error.errors(include_url=False, include_context=False), CompletionRequest) from None
    if request.stream:
        raise BadRequest("stream is not offered in a job; follow its events", param="stream")
    services.check_model(request.model)
    await prepare(services, request, terms_of(asked, request))
    # A seed that is settled now gives the same text when the work is done again.
    seed = secrets.randbits(63) if request.seed is None else request.seed
    options = {**request.model_dump(mode="json", exclude_unset=True), "seed": seed}
    return await services.jobs.api.completion(record_of(asked).caller, options)


def _refuse_format(options: EncodingOptions) -> None:
    """Raises: BadRequest for options of an answer, which a job is asked for later."""
    for name in ("format", "from_row"):
        if name in options.model_fields_set:
            raise BadRequest(
                f"{name} is an option of the result: GET /v1/jobs/{{id}}/result?{name}=…",
                code=Code.UNSUPPORTED_PARAMETER,
                param=name,
            )


async def job_response(services: Services, name: str, record: JobRecord, **headers: str) -> Response:
    """202: the job is taken, and where it is."""
    job = await services.jobs.api.view(name, record)
    told = {"location": f"/v1/jobs/{name}", **{key.replace("_", "-"): value for key, value in headers.items()}}
    return Response(job.model_dump_json(), status_code=202, media_type="application/json", headers=told)


@router.get("/v1/jobs", summary="Jobs of this caller", openapi_extra={"parameters": query_parameters(ListJobs)})
async def list_jobs(request: Request) -> JobList:
    """In order of arrival, a page at a time: `after` is the last id of the page before."""
    services = services_of(request)
    options = parse_query(request.query_params.multi_items(), ListJobs)
    found = await services.jobs.api.listed(record_of(request).caller, options.after, options.limit + 1)
    jobs = [await services.jobs.api.view(name, record) for name, record in found[: options.limit]]
    return JobList(data=jobs, has_more=len(found) > options.limit)


@router.get("/v1/jobs/{job_id}", summary="How a job stands")
async def get_job(request: Request, job_id: str) -> Job:
    """Its status, progress and the time that it will still take."""
    services = services_of(request)
    return await services.jobs.api.view(job_id, await services.jobs.api.get(record_of(request).caller, job_id))


@router.post("/v1/jobs/{job_id}/cancel", summary="Stop a job")
async def cancel_job(request: Request, job_id: str) -> Job:
    """At once where it waits, within a second or so where it runs; rows that are there stay."""
    services = services_of(request)
    return await services.jobs.api.view(job_id, await services.jobs.api.cancel(record_of(request).caller, job_id))


@router.delete("/v1/jobs/{job_id}", summary="Stop and forget a job", status_code=204, response_class=Response)
async def delete_job(request: Request, job_id: str) -> Response:
    """Its input and results go too."""
    services = services_of(request)
    await services.jobs.api.delete(record_of(request).caller, job_id)
    return Response(status_code=204)


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="What happens to a job",
    response_class=Response,
    openapi_extra={"parameters": query_parameters(EventOptions)},
    responses={200: {"content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/ServerSentEvent"}}}}},
)
async def follow_job(request: Request, job_id: str) -> Response:
    """Numbered server-sent events behind `after` (or `Last-Event-ID`), until the job has ended."""
    services, record = services_of(request), record_of(request)
    after = parse_query(request.query_params.multi_items(), EventOptions).after
    last = request.headers.get("last-event-id", "")
    if last.isdecimal() and len(last) < 17:
        after = max(after, int(last))
    await services.jobs.api.get(record.caller, job_id)
    body = services.body(request)

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await while_connected(body, _events(services, record.caller, job_id, after, writer))

    return _streamed(services, request, body, exchange, words=_event_error)


async def _events(services: Services, caller: str, name: str, after: int, writer: ResponseWriter) -> None:
    await writer.start(EVENT_STREAM)
    await writer.write(b": following\n\n")
    seen = after
    async for event in services.jobs.api.events(caller, name, after, services.settings.ping_seconds):
        if event is None:
            await writer.write(b": ping\n\n")
            continue
        seen = event.number
        data = msgspec.json.encode({"type": event.type, "at": event.at, **event.data})
        await writer.write(b"id: %d\nevent: %b\ndata: %b\n\n" % (seen, event.type.encode(), data))
    await writer.finish()


def _event_error(error: ServiceError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode({"error": error.error_object()}) + b"\n\n"


@router.get(
    "/v1/jobs/{job_id}/result",
    summary="What a job has come to",
    response_class=Response,
    openapi_extra={"parameters": query_parameters(ResultOptions)},
    responses={200: {"content": {kind.media_type: {"schema": {"type": "string"}} for kind in FORMATS.values()}}},
)
async def get_result(request: Request, job_id: str) -> Response:
    """Rows as /v1/encodings gives them, while the job runs as they come; of a completion its JSON."""
    services, record = services_of(request), record_of(request)
    options = parse_query(request.query_params.multi_items(), ResultOptions)
    job = await services.jobs.api.get(record.caller, job_id)
    if job.kind == "completion":
        return Response(await services.jobs.results.completion(job_id, job), media_type="application/json")
    form, first = choose_format(options.format, request.headers.get("accept", "")), options.from_row
    wanted = ResultWanted(form, first, _part(request, form, job_id, first))
    body = services.body(request)

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await while_connected(body, services.jobs.results.rows(job_id, job, wanted, writer))

    return _streamed(
        services, request, body, exchange, words=no_error_trailer if FORMATS[form].breaks_off else ServiceError.line
    )


def _part(request: Request, form: str, name: str, first_row: int) -> tuple[int | None, int | None] | None:
    """The range of bytes that is asked for, of a file whose bytes are known; otherwise all of it is answered."""
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    same = request.headers.get("if-range", f'"{name}.{first_row}"') == f'"{name}.{first_row}"'
    if found is None or not same or not FORMATS[form].needs_count or not any(found.groups()):
        return None
    first, last = (int(text) if text else None for text in found.groups())
    return None if first is not None and last is not None and last < first else (first, last)


def _streamed(
    services: Services, request: Request, body: RequestBody, exchange: Any, *, words: Any
) -> StreamedResponse:
    return StreamedResponse(
        exchange,
        body,
        record_of(request),
        last_words=words,
        stall_seconds=services.settings.client_stall_seconds,
    )
