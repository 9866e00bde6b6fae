"""POST /v1/estimate: what work would take, before it is sent."""

from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request

from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import parse_json, parse_query, utf8
from dist_attn_service.dependencies import Services, caller_of, media_type, read_json_body, record_of, services_of
from dist_attn_service.encodings.estimates import PIECES, Size
from dist_attn_service.routers.document_bodies import JSON, TEXT, named_file
from dist_attn_service.schemas.completions import EncodingOptions
from dist_attn_service.schemas.jobs import Estimate, EstimateOptions, EstimateRequest
from dist_attn_service.text.text_check import TextCheck
from dist_attn_service.uploads.entries import FileRecord

__all__ = ["router"]

router = APIRouter(tags=["jobs"])
SAMPLE_BYTES = 1 << 20


@router.post(
    "/v1/estimate",
    summary="Estimate tokens, time, memory and output",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"$ref": "#/components/schemas/EstimateRequest"}},
                TEXT: {"schema": {"type": "string"}},
            },
        },
    },
)
async def create_estimate(request: Request) -> Estimate:
    """Figures for an encoding, or with `max_tokens` for a completion; nothing is started.

    A body of text is the `input`, beside the other fields in the query; it is checked as an encoding would check it.
    """
    services = services_of(request)
    wanted = await (_with_text if media_type(request, gzip=True) == TEXT else _as_json)(request, services)
    services.check_model(wanted.model)
    if wanted.max_tokens is not None:
        services.check_writes()
    given = {"granularity": wanted.granularity}
    options = EncodingOptions.model_validate(given | ({} if wanted.window is None else {"window": wanted.window}))
    return await services.estimates.estimate(
        await _size(request, services, wanted), services.rows(options), wanted.max_tokens
    )


async def _as_json(request: Request, services: Services) -> EstimateRequest:
    body = services.body(request)
    return parse_json(await read_json_body(request, body, services.settings.json_body_bytes), EstimateRequest)


async def _with_text(request: Request, services: Services) -> EstimateRequest:
    """The query, and the body as `input`; beside `bytes` it may end in the middle of a character.

    Raises: BadRequest, ServiceError (415) for what is not plain text, TooLarge.
    """
    options = parse_query(request.query_params.multi_items(), EstimateOptions)
    record = record_of(request)
    hold = services.json_memory.hold(record.holder, record.at_end.append)
    sample = await services.body(request).read_all(services.settings.json_body_bytes, hold)
    TextCheck(TEXT).push(sample, final=len(sample) >= (options.bytes or 0))
    text = sample.decode("utf-8", errors="ignore")
    return EstimateRequest.model_validate({**options.model_dump(), "input": text})


async def _size(request: Request, services: Services, wanted: EstimateRequest) -> Size:
    """The size that is given in one way.

    Raises: BadRequest for none, or two that may contradict each other; NotFound, TooLarge for a file.
    """
    given = [name for name in ("tokens", "file_id", "bytes", "input") if getattr(wanted, name) is not None]
    if not given:
        raise BadRequest("send bytes, tokens, input or file_id", code=Code.MISSING_PARAMETER, param="bytes")
    if given[0] in ("tokens", "file_id") and len(given) > 1:
        param = "file_id" if "file_id" in given else given[1]
        raise BadRequest(f"{given[0]} and {given[1]} were given; send one of them", param=param)
    if wanted.file_id is not None:
        file = await named_file(services, caller_of(request), wanted.file_id)
        return Size(size=file.size, text=await _sample(services, file))
    text = None if wanted.input is None else utf8(wanted.input, "input", "input")
    if text is not None and wanted.bytes is not None and len(text) > wanted.bytes:
        raise BadRequest(f"the sample has {len(text)} bytes, and the text {wanted.bytes}", param="bytes")
    return Size(tokens=wanted.tokens, size=wanted.bytes, text=text)


async def _sample(services: Services, file: FileRecord) -> bytes:
    """All of a short file; of a long one so many pieces at equal distances as a sample is cut into."""
    if file.size <= SAMPLE_BYTES:
        begins, length = [0], file.size
    else:
        length = SAMPLE_BYTES // PIECES
        begins = [(file.size - length) * place // (PIECES - 1) for place in range(PIECES)]
    found = bytearray()
    for begin in begins:
        async with aclosing(services.files.read(file, begin, begin + length)) as pieces:
            async for piece in pieces:
                found += piece
    return bytes(found)
