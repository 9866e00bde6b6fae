"""POST /v1/embeddings: OpenAI's embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dist_attn_service.base.errors import ClientGone
from dist_attn_service.base.parsing import parse_json, terms_of
from dist_attn_service.dependencies import read_json_body, record_of, services_of
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.schemas.completions import Embedding, EmbeddingList, EmbeddingRequest, Usage

__all__ = ["router"]

router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    summary="Embed texts",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EmbeddingRequest"}}},
        }
    },
)
async def create_embeddings(request: Request) -> Response:
    """One vector for each input: the mean of a language model's hidden states over it, or a text encoder's own."""
    services, record = services_of(request), record_of(request)
    body = services.body(request)
    wanted = parse_json(await read_json_body(request, body, services.settings.json_body_bytes), EmbeddingRequest)
    services.check_model(wanted.model)
    inputs = services.embeddings.prepare(wanted)
    record.note(inputs=len(inputs))
    terms = terms_of(request)
    try:
        with services.open_requests.one(record.holder):
            vectors = await while_connected(body, services.embeddings.embed(inputs, record.request_id, terms))
    except ClientGone:
        record.reason = "client_gone"
        return Response(status_code=499)
    services.count(record, "embedding", vectors.tokens)

    def written() -> bytes:
        rows = vectors.as_base64() if wanted.encoding_format == "base64" else vectors.as_numbers()
        answer = EmbeddingList(
            model=services.model.id,
            data=[Embedding(index=index, embedding=row) for index, row in enumerate(rows)],
            usage=Usage(prompt_tokens=vectors.tokens, total_tokens=vectors.tokens),
        )
        return answer.model_dump_json().encode()

    return Response(await services.beside(written), media_type="application/json")
