"""POST /v1/estimate: what work would take, before it is sent."""

from fastapi import APIRouter
from starlette.requests import Request

from service.dependencies import Services, read_json_body, services_of
from service.errors import BadRequest, Code
from service.estimates import Size
from service.job_schemas import Estimate, EstimateRequest
from service.parsing import parse_json, utf8
from service.schemas import EncodingOptions

__all__ = ["router"]

router = APIRouter(tags=["jobs"])


@router.post(
    "/v1/estimate",
    summary="Estimate tokens, time, memory and output",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EstimateRequest"}}},
        },
    },
)
async def create_estimate(request: Request) -> Estimate:
    """Figures for an encoding, or with `max_tokens` for a completion; nothing is started."""
    services = services_of(request)
    body = services.body(request)
    wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), EstimateRequest)
    services.check_model(wanted.model)
    if wanted.max_tokens is not None:
        services.check_writes()
    given = {"granularity": wanted.granularity}
    options = EncodingOptions.model_validate(given | ({} if wanted.window is None else {"window": wanted.window}))
    return await services.estimates.estimate(_size(services, wanted), services.rows(options), wanted.max_tokens)


def _size(services: Services, wanted: EstimateRequest) -> Size:
    """The size that is given in one way.

    Raises: BadRequest for none, or two that may contradict each other.
    """
    given = [name for name in ("tokens", "bytes", "input") if getattr(wanted, name) is not None]
    if not given:
        raise BadRequest("send bytes, tokens or input", code=Code.MISSING_PARAMETER, param="bytes")
    if "tokens" in given and len(given) > 1:
        raise BadRequest(f"tokens and {given[1]} were given; send one of them", param=given[1])
    text = None if wanted.input is None else utf8(wanted.input, "input", "input")
    if text is not None and wanted.bytes is not None and len(text) > wanted.bytes:
        raise BadRequest(f"the sample has {len(text)} bytes, and the text {wanted.bytes}", param="bytes")
    return Size(tokens=wanted.tokens, size=wanted.bytes, text=text)
