"""/v1/jobs: work that goes on without its client, found again by its id."""

import secrets

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import Job, JobList
from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.base.parsing import validated
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.dependencies import Services
from dist_attn_service.encodings.formats import FORMATS, choose_format
from dist_attn_service.http.exchange import EVENT_STREAM, ResponseWriter, while_connected
from dist_attn_service.jobs.catalogue import JobRecord
from dist_attn_service.jobs.results import ResultWanted
from dist_attn_service.routers.incoming import (
    DOCUMENTS,
    Asked,
    Incoming,
    check_boundaries,
    document_source,
    json_response,
    named_source,
    no_error_trailer,
)
from dist_attn_service.routers.openapi import JSON, answered, described, events, query_parameters
from dist_attn_service.schemas.base import ListOptions
from dist_attn_service.schemas.completions import CompletionRequest
from dist_attn_service.schemas.documents import EncodingOptions, EventOptions, JobRequest, ResultOptions

router = APIRouter(tags=["jobs"])
ROW_TYPES = tuple(form.media_type for form in FORMATS.values())


@router.post(
    "/v1/jobs",
    summary="Hand in work that outlives the connection",
    status_code=202,
    responses={202: {"model": Job, "description": "The job, which has begun or waits."}},
    response_class=Response,
    openapi_extra=described(
        JobRequest, content=DOCUMENTS, parameters=query_parameters(EncodingOptions, leave_out=("format", "from_row"))
    ),
)
async def create_job(asked: Asked) -> Response:
    """Hand in an encoding of the body (with the query of /v1/encodings), or a JSON body's work; 202 with the job."""
    services = asked.services
    if asked.media_type(gzip=True) != JSON:
        options = asked.query(EncodingOptions)
        _refuse_format(options)
        served = services.context_for(options.model, "encodings")
        source = document_source(asked)
        with asked.place():
            rows = served.rows(options.granularity, *options.sizes)
            made = await services.jobs.encoding(served, asked.caller, rows, source)
        return await job_response(services, *made)
    wanted = await asked.json(JobRequest)
    with asked.place():
        made = await (_encoding if wanted.completion is None else _completion)(asked, wanted)
        return await job_response(services, *made)


async def _encoding(asked: Incoming, wanted: JobRequest) -> tuple[str, JobRecord]:
    """Make an encoding job with a copy of the text or file, so that the file may be deleted at once."""
    served = asked.services.context_for(wanted.model, "encodings")
    if wanted.input is None and wanted.file_id is None:
        raise BadRequest("send input, file_id or completion", code=Code.MISSING_PARAMETER, param="input")
    granularity = wanted.granularity or "window" if wanted.boundaries is None else "boundaries"
    spec = served.rows(granularity, wanted.window, wanted.pooling)
    source, boundaries = await named_source(asked, wanted.input, wanted.file_id), wanted.boundaries or []
    if boundaries:
        named = {name for name in ("granularity", "window") if getattr(wanted, name) is not None}
        check_boundaries(boundaries, named, source)
    return await asked.services.jobs.encoding(served, asked.caller, spec, source, boundaries)


async def _completion(asked: Incoming, wanted: JobRequest) -> tuple[str, JobRecord]:
    """Make a completion job, checked as far as it can be without the engine."""
    served = asked.services.context_for(wanted.model, "completions")
    for name in ("input", "file_id", "granularity", "window", "pooling", "boundaries"):
        if getattr(wanted, name) is not None:
            raise BadRequest(f"{name} and completion were given; a job is one of the two", param=name)
    completion = validated(CompletionRequest, wanted.completion)
    if completion.stream:
        raise BadRequest("stream is not offered in a job; follow its events", param="stream")
    if completion.model is not None:
        named = asked.services.context_for(completion.model, "completions")
        if wanted.model is not None and named is not served:
            raise BadRequest(
                f"model is {wanted.model!r}, and that of the completion {completion.model!r}; send one of them",
                param="model",
            )
        served = named
    await prepare(served, completion, asked.terms(completion))
    # A seed that is settled now gives the same text when the work is done again.
    seed = secrets.randbits(63) if completion.seed is None else completion.seed
    options = {**completion.model_dump(mode="json", exclude_unset=True), "seed": seed}
    return await asked.services.jobs.completion(served, asked.caller, options)


def _refuse_format(options: EncodingOptions) -> None:
    """Refuse the options of an answer, which belong to the request for the result. Raises: BadRequest."""
    for name in ("format", "from_row"):
        if name in options.model_fields_set:
            raise BadRequest(
                f"{name} is an option of the result: GET /v1/jobs/{{id}}/result?{name}=…",
                code=Code.UNSUPPORTED_PARAMETER,
                param=name,
            )


async def job_response(services: Services, name: str, record: JobRecord, **headers: str) -> Response:
    """The 202 for a job that is taken, with its Location."""
    more = {key.replace("_", "-"): value for key, value in headers.items()}
    return json_response(
        await services.jobs.view(name, record), status=202, headers={"location": f"/v1/jobs/{name}", **more}
    )


@router.get(
    "/v1/jobs", summary="Jobs of this caller", openapi_extra=described(parameters=query_parameters(ListOptions))
)
async def list_jobs(asked: Asked) -> JobList:
    """The caller's jobs in order of arrival, a page at a time: `after` is the last id of the page before."""
    jobs, options = asked.services.jobs, asked.query(ListOptions)
    listed = await jobs.listed(asked.caller, options.after, options.limit + 1)
    page = [await jobs.view(name, record) for name, record in listed[: options.limit]]
    return JobList(data=page, has_more=len(listed) > options.limit)


@router.get("/v1/jobs/{job_id}", summary="How a job stands")
async def get_job(asked: Asked, job_id: str) -> Job:
    """The job's status, its progress and the time that it will still take."""
    jobs = asked.services.jobs
    return await jobs.view(job_id, await jobs.get(asked.caller, job_id))


@router.post("/v1/jobs/{job_id}/cancel", summary="Stop a job")
async def cancel_job(asked: Asked, job_id: str) -> Job:
    """Stop a job: at once where it waits, within a second or so where it runs; rows that are there stay."""
    jobs = asked.services.jobs
    return await jobs.view(job_id, await jobs.cancel(asked.caller, job_id))


@router.delete("/v1/jobs/{job_id}", summary="Stop and forget a job", status_code=204, response_class=Response)
async def delete_job(asked: Asked, job_id: str) -> Response:
    """Stop a job, and forget it with its input and results."""
    await asked.services.jobs.delete(asked.caller, job_id)
    return Response(status_code=204)


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="What happens to a job",
    response_class=Response,
    openapi_extra=described(
        parameters=query_parameters(EventOptions), answers=events("Events, until the job has ended.")
    ),
)
async def follow_job(asked: Asked, job_id: str) -> Response:
    """Numbered server-sent events after number `after` (or `Last-Event-ID`), until the job has ended."""
    after = asked.query(EventOptions).after
    last = asked.headers.get("last-event-id", "")
    if last.isdecimal() and len(last) < 17:
        after = max(after, int(last))
    await asked.services.jobs.get(asked.caller, job_id)
    return asked.streamed(
        lambda writer: while_connected(asked.body, _events(asked, job_id, after, writer)), _event_error
    )


async def _events(asked: Incoming, name: str, after: int, writer: ResponseWriter) -> None:
    await writer.start(EVENT_STREAM)
    await writer.write(b": following\n\n")
    services = asked.services
    async for event in services.jobs.events(asked.caller, name, after, services.settings.ping_seconds):
        if event is None:
            await writer.write(b": ping\n\n")
            continue
        data = msgspec.json.encode({"type": event.type, "at": event.at, **event.data})
        await writer.write(b"id: %d\nevent: %b\ndata: %b\n\n" % (event.number, event.type.encode(), data))
    await writer.finish()


def _event_error(error: ServiceError) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode({"error": error.error_object()}) + b"\n\n"


@router.get(
    "/v1/jobs/{job_id}/result",
    summary="What a job has come to",
    response_class=Response,
    openapi_extra=described(
        parameters=query_parameters(ResultOptions),
        answers=answered("Rows in one of their formats, or a completion.", *ROW_TYPES),
    ),
)
async def get_result(asked: Asked, job_id: str) -> Response:
    """The rows as /v1/encodings gives them, as they come while the job runs; of a completion its JSON."""
    options, jobs = asked.query(ResultOptions), asked.services.jobs
    job = await jobs.get(asked.caller, job_id)
    if job.kind == "completion":
        return Response(await jobs.results.completion(job_id, job), media_type=JSON)
    form, first = choose_format(options.format, asked.headers.get("accept", "")), options.from_row
    tag = f'"{job_id}.{first}"'
    part = asked.headers.get("range") if asked.headers.get("if-range", tag) == tag else None
    wanted = ResultWanted(form, first, part)
    return asked.streamed(
        lambda writer: while_connected(asked.body, jobs.results.rows(job_id, job, wanted, writer)),
        no_error_trailer if FORMATS[form].breaks_off else ServiceError.line,
    )
