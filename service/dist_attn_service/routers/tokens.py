"""POST /tokenize and /detokenize: what the model's tokeniser makes of a text, in vLLM's shapes."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.parsing import parse_json, parse_tokens, utf8
from dist_attn_service.dependencies import read_json_body, services_of
from dist_attn_service.schemas.completions import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from dist_attn_service.text.tokenising import tokens_of

__all__ = ["router"]

router = APIRouter(tags=["tokens"])
ANY_LENGTH = (
    1 << 53
)  # a text may have any length; clients want a number, and this is the largest all of them keep exact


@router.post(
    "/tokenize",
    response_model=Tokenized,
    summary="Cut a text into tokens",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TokenizeRequest"}}},
        }
    },
)
async def tokenize(request: Request) -> Response:
    """The tokens of a text, which may be empty."""
    services = services_of(request)
    limit = services.settings.json_body_bytes
    wanted = parse_json(await read_json_body(request, services.body(request), limit), TokenizeRequest)
    services.check_model(wanted.model)
    text = utf8(wanted.prompt, "prompt", "prompt")
    tokens = await tokens_of(services.tokeniser, text, services.settings.piece_bytes)
    strings = await services.tokeniser.texts(tokens) if wanted.return_token_strs else None

    longest = services.model.max_tokens or ANY_LENGTH

    def written() -> bytes:
        answer = Tokenized(count=len(tokens), max_model_len=longest, tokens=tokens.tolist(), token_strs=strings)
        return answer.model_dump_json().encode()

    return Response(await services.beside(written), media_type="application/json")


@router.post(
    "/detokenize",
    response_model=Detokenized,
    summary="Put tokens together",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/DetokenizeRequest"}}},
        }
    },
)
async def detokenize(request: Request) -> Detokenized:
    """The text of the tokens, with U+FFFD where they are not UTF-8."""
    services = services_of(request)
    limit = services.settings.json_body_bytes
    wanted = parse_json(await read_json_body(request, services.body(request), limit), DetokenizeRequest)
    services.check_model(wanted.model)
    tokens = parse_tokens(wanted.tokens, "tokens", "tokens", services.tokeniser.vocab_size)
    return Detokenized(prompt=await services.tokeniser.text(tokens))
