"""POST /v1/encodings: a document of any length in, rows out while it still arrives, or a job (RFC 7240)."""

import re

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.responses import Response

from dist_attn_service.base.errors import BadRequest, Code, ServiceError, retry_after
from dist_attn_service.dependencies import ModelServices
from dist_attn_service.encodings.documents import DocumentSource, RowRequest
from dist_attn_service.encodings.estimates import Size
from dist_attn_service.encodings.formats import FORMATS, choose_format
from dist_attn_service.routers.incoming import (
    DOCUMENTS,
    Asked,
    Incoming,
    check_boundaries,
    document_source,
    named_source,
    no_error_trailer,
)
from dist_attn_service.routers.jobs import ROW_TYPES, job_response
from dist_attn_service.routers.openapi import JSON, REFERENCE, answered, described, query_parameters
from dist_attn_service.schemas.documents import EncodingOptions, EncodingRequest

router = APIRouter(tags=["encodings"])
_WAIT = re.compile(r"wait=\"?(\d{1,9})\"?")
_JOB = {
    "description": "A job: `Prefer: respond-async` asked for it, or work would wait for too long.",
    "content": {JSON: {"schema": {"$ref": REFERENCE.format(model="Job")}}},
}
_ROWS = answered(
    "The rows, in the format that `format` or else `Accept` names: lines of JSON, the last of them a summary or an "
    "error; an Arrow stream; or a file of NumPy.",
    *ROW_TYPES,
)


@router.post(
    "/v1/encodings",
    summary="Encode a document of any length",
    response_class=Response,
    openapi_extra=described(
        EncodingRequest,
        content=DOCUMENTS,
        parameters=query_parameters(EncodingOptions),
        answers={**_ROWS, "202": _JOB},
    ),
)
async def create_encoding(asked: Asked) -> Response:
    """Stream rows back while the document is still being sent."""
    services, record = asked.services, asked.record
    source, options, boundaries = await _source(asked, asked.query(EncodingOptions))
    served = services.context_for(options.model, "encodings")
    named = options.format if "format" in options.model_fields_set else None
    form = choose_format(named, asked.headers.get("accept", ""))
    spec = served.rows("boundaries" if boundaries else options.granularity, *options.sizes)
    wanted = RowRequest(spec, form, options.from_row, boundaries, asked.terms())
    _check_length(form, source)
    if await becomes_job(served, asked.headers, source):
        with asked.place():
            made = await services.jobs.encoding(served, asked.caller, spec, source, boundaries)
        return await job_response(services, *made, preference_applied="respond-async")
    return asked.streamed(
        lambda writer: served.documents.answer(wanted, source, asked.body, writer, record),
        no_error_trailer if FORMATS[form].breaks_off else ServiceError.line,
    )


async def _source(asked: Incoming, options: EncodingOptions) -> tuple[DocumentSource, EncodingOptions, list[int]]:
    """The document, the options of query and JSON together, and the offsets at which rows end, if these are given."""
    if asked.media_type(gzip=True) != JSON:
        return document_source(asked), options, []
    wanted = await asked.json(EncodingRequest)
    source, options = await named_source(asked, wanted.input, wanted.file_id), _merged(options, wanted)
    if wanted.boundaries is not None:
        check_boundaries(wanted.boundaries, options.model_fields_set, source)
    return source, options, wanted.boundaries or []


def _merged(query: EncodingOptions, wanted: EncodingRequest) -> EncodingOptions:
    """Join the options of JSON and query; a contradiction is refused rather than resolved silently."""
    values = {name: getattr(query, name) for name in query.model_fields_set}
    for name in wanted.model_fields_set - {"input", "file_id", "boundaries"}:
        value = getattr(wanted, name)
        if values.setdefault(name, value) != value:
            raise BadRequest(f"{name} is {values[name]!r} in the query and {value!r} in the body", param=name)
    return EncodingOptions(**values)


def _check_length(form: str, source: DocumentSource) -> None:
    """Refuse a format that needs the number of rows where the document's length is not known beforehand.

    Raises: BadRequest.
    """
    if FORMATS[form].needs_count and source.size is None:
        raise BadRequest(
            f"format={form} has the number of rows in its header, and this body's length is not known beforehand: "
            "send it with Content-Length and not in gzip, or take format=arrow or ndjson",
            code=Code.UNSUPPORTED_PARAMETER,
            param="format",
        )


# ---- jobs in place of rows -----------------------------------------------------------------------


def _preference(headers: Headers) -> tuple[bool, int | None]:
    """Read `Prefer`: whether an answer of 202 is welcome, and None or the seconds that work must take for it.

    Unknown preferences mean nothing.
    """
    words = [word.split(";")[0].strip().lower() for line in headers.getlist("prefer") for word in line.split(",")]
    waits = [int(match[1]) for word in words if (match := _WAIT.fullmatch(word))]
    return "respond-async" in words, waits[0] if waits else None


async def becomes_job(served: ModelServices, headers: Headers, source: DocumentSource) -> bool:
    """Return whether an encoding is answered with 202 and a job.

    Raises: ServiceError (429) when it would wait for longer than `jobs.queue_s`, and neither its client nor the
        settings allow a job.
    """
    (welcome, wait), limits = _preference(headers), served.settings.jobs
    if welcome and wait is None:
        return True
    if source.size is None:
        return welcome  # its time cannot be estimated
    queue, total = await served.estimates.delay(Size(size=source.size))
    if welcome and wait is not None and total > wait:
        return True
    if queue <= limits.queue_s:
        return False
    if welcome or limits.when_busy == "job":
        return True
    raise ServiceError(
        f"this would wait for about {queue:.0f} s behind other work; send it with `Prefer: respond-async` and it "
        "becomes a job, or send it later",
        code=Code.OVERLOADED,
        headers=retry_after(queue),
    )
