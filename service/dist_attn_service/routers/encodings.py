"""POST /v1/encodings: a document of any length in, rows out while it still arrives."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.base.parsing import parse_json, parse_query, terms_of
from dist_attn_service.dependencies import Services, caller_of, media_type, read_json_body, record_of, services_of
from dist_attn_service.encodings.documents import RowRequest, Source
from dist_attn_service.encodings.formats import FORMATS, choose_format
from dist_attn_service.http.exchange import RequestBody, ResponseWriter, StreamedResponse
from dist_attn_service.routers.document_bodies import (
    DOCUMENTS,
    JSON,
    document_source,
    named_source,
    no_error_trailer,
    query_parameters,
)
from dist_attn_service.routers.jobs import job_response
from dist_attn_service.routers.prefer import becomes_job
from dist_attn_service.schemas.completions import EncodingOptions, EncodingRequest

__all__ = ["router"]

router = APIRouter(tags=["encodings"])


@router.post(
    "/v1/encodings",
    summary="Encode a document of any length",
    response_class=Response,
    openapi_extra={
        "parameters": query_parameters(EncodingOptions),
        "requestBody": {
            "required": True,
            "content": {
                **DOCUMENTS,
                JSON: {"schema": {"$ref": "#/components/schemas/EncodingRequest"}},
            },
        },
        "responses": {
            "200": {
                "description": "The rows, in the format that `format` or else `Accept` names: lines of JSON, the last "
                "of them a summary or an error; an Arrow stream; or a file of NumPy.",
                "content": {kind.media_type: {"schema": {"type": "string"}} for kind in FORMATS.values()},
            },
            "202": {
                "description": "A job: `Prefer: respond-async` asked for it, or work would wait for too long.",
                "content": {JSON: {"schema": {"$ref": "#/components/schemas/Job"}}},
            },
        },
    },
)
async def create_encoding(request: Request) -> Response:
    """Stream rows back while the document is still being sent."""
    services, record = services_of(request), record_of(request)
    options = parse_query(request.query_params.multi_items(), EncodingOptions)
    body = services.body(request)
    source, options = await _source(request, services, body, options)
    services.check_model(options.model)
    named = options.format if "format" in options.model_fields_set else None
    form = choose_format(named, request.headers.get("accept", ""))
    spec = services.rows(options)
    wanted = RowRequest(spec, form, options.from_row, terms_of(request))
    _check_length(form, source)

    if await becomes_job(services, request.headers, source):
        with services.open_requests.one(record.holder):
            made = await services.jobs.api.encoding(record.caller, spec, source.chunks(), source.size)
        return await job_response(services, *made, preference_applied="respond-async")

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await services.documents.answer(wanted, source, body, writer, record)

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=no_error_trailer if FORMATS[form].breaks_off else ServiceError.line,
        stall_seconds=services.settings.client_stall_seconds,
    )


async def _source(
    request: Request, services: Services, body: RequestBody, options: EncodingOptions
) -> tuple[Source, EncodingOptions]:
    """Where the document is, and the options of query and JSON together."""
    kind = media_type(request, gzip=True)
    if kind == JSON:
        wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), EncodingRequest)
        source = await named_source(services, caller_of(request), wanted.input, wanted.file_id)
        return source, _merged(options, wanted)
    return document_source(request, services, body), options


def _merged(query: EncodingOptions, wanted: EncodingRequest) -> EncodingOptions:
    """JSON options and query options; a contradiction is refused rather than resolved silently."""
    values = {name: getattr(query, name) for name in query.model_fields_set}
    for name in wanted.model_fields_set - {"input", "file_id"}:
        value = getattr(wanted, name)
        if values.setdefault(name, value) != value:
            raise BadRequest(f"{name} is {values[name]!r} in the query and {value!r} in the body", param=name)
    return EncodingOptions(**values)


def _check_length(form: str, source: Source) -> None:
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
