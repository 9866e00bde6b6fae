"""/v1/embeddings, /tokenize, /detokenize and /v1/estimate: the routes for texts that come whole."""

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dist_attn.wire.specs import LONGEST_TEXT
from dist_attn_api.types import Detokenized, Embedding, EmbeddingList, Estimate, Tokenized, Usage
from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import parse_tokens, utf8
from dist_attn_service.dependencies import Services
from dist_attn_service.encodings.estimates import PIECES, Size
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.routers.incoming import Asked, Incoming, json_response, named_file
from dist_attn_service.routers.openapi import ANY_TEXT, TEXT, described
from dist_attn_service.schemas.documents import (
    DetokenizeRequest,
    EmbeddingRequest,
    EstimateOptions,
    EstimateRequest,
    TokenizeRequest,
)
from dist_attn_service.text.text_check import TextCheck
from dist_attn_service.uploads.ledger import FileRecord

router = APIRouter()
SAMPLE_BYTES = 1 << 20


@router.post(
    "/v1/embeddings",
    tags=["embeddings"],
    response_model=EmbeddingList,
    summary="Embed texts",
    openapi_extra=described(EmbeddingRequest),
)
async def create_embeddings(asked: Asked) -> Response:
    """One vector for each input: the mean of a language model's hidden states over it, or a text encoder's own."""
    services, record = asked.services, asked.record
    wanted = await asked.json(EmbeddingRequest)
    served = services.context_for(wanted.model, "embeddings")
    inputs = served.embeddings.prepare(wanted)
    record.note(inputs=len(inputs))
    terms = asked.terms()
    with asked.place():
        vectors = await while_connected(asked.body, served.embeddings.embed(inputs, record.request_id, terms))
    services.count(record, "embedding", vectors.tokens)

    def written() -> Response:
        rows: list[Any] = vectors.as_base64() if wanted.encoding_format == "base64" else vectors.as_numbers()
        data = [Embedding(index=index, embedding=row) for index, row in enumerate(rows)]
        usage = Usage(prompt_tokens=vectors.tokens, total_tokens=vectors.tokens)
        return json_response(EmbeddingList(model=served.model.id, data=data, usage=usage))

    return await services.beside(written)


@router.post(
    "/tokenize",
    tags=["tokens"],
    response_model=Tokenized,
    summary="Cut a text into tokens",
    openapi_extra=described(TokenizeRequest),
)
async def tokenize(asked: Asked) -> Response:
    """The tokens of a text, which may be empty."""
    services = asked.services
    wanted = await asked.json(TokenizeRequest)
    served = services.context_for(wanted.model)
    text = utf8(wanted.prompt, "prompt", "prompt")
    framed = wanted.add_special_tokens is not False and served.model.writes
    tokens = await served.tokeniser.whole(text, framed=framed)
    strings = await served.tokeniser.texts(tokens) if wanted.return_token_strs else None
    longest = served.model.max_tokens or LONGEST_TEXT  # clients want a number

    def written() -> Response:
        return json_response(
            Tokenized(count=len(tokens), max_model_len=longest, tokens=tokens.tolist(), token_strs=strings)
        )

    return await services.beside(written)


@router.post("/detokenize", tags=["tokens"], summary="Put tokens together", openapi_extra=described(DetokenizeRequest))
async def detokenize(asked: Asked) -> Detokenized:
    """The text of the tokens, with U+FFFD where they are not UTF-8."""
    wanted = await asked.json(DetokenizeRequest)
    tokeniser = asked.services.context_for(wanted.model).tokeniser
    tokens = parse_tokens(wanted.tokens, "tokens", "tokens", tokeniser.vocab_size)
    return Detokenized(prompt=await tokeniser.text(tokens))


# ---- /v1/estimate --------------------------------------------------------------------------------


@router.post(
    "/v1/estimate",
    tags=["jobs"],
    summary="Estimate tokens, time, memory and output",
    openapi_extra=described(EstimateRequest, content={TEXT: ANY_TEXT}),
)
async def create_estimate(asked: Asked) -> Estimate:
    """Figures for an encoding, or with `max_tokens` for a completion; nothing is started.

    A body of text is the `input`, beside the other fields in the query; it is checked as an encoding would check it.
    """
    is_text = asked.media_type(gzip=True) == TEXT
    wanted = await _with_text(asked) if is_text else await asked.json(EstimateRequest)
    served = asked.services.context_for(wanted.model, "encodings" if wanted.max_tokens is None else "completions")
    rows = served.rows(wanted.granularity, wanted.window)
    return await served.estimates.estimate(await _size(asked, wanted), rows, wanted.max_tokens)


async def _with_text(asked: Incoming) -> EstimateRequest:
    """Join the query and the body as `input`, which beside `bytes` may end in the middle of a character.

    Raises: BadRequest, ServiceError (415) for what is not plain text, TooLarge.
    """
    options, sample = asked.query(EstimateOptions), await asked.whole()
    TextCheck(TEXT).push(sample, final=len(sample) >= (options.bytes or 0))
    text = sample.decode("utf-8", errors="ignore")
    return EstimateRequest.model_validate({**options.model_dump(), "input": text})


async def _size(asked: Incoming, wanted: EstimateRequest) -> Size:
    """The size of the text, which is given in one way.

    Raises: BadRequest for none, or two that may contradict each other; NotFound, TooLarge for a file.
    """
    sizes = [name for name in ("tokens", "file_id", "bytes", "input") if getattr(wanted, name) is not None]
    if not sizes:
        raise BadRequest("send bytes, tokens, input or file_id", code=Code.MISSING_PARAMETER, param="bytes")
    if sizes[0] in ("tokens", "file_id") and len(sizes) > 1:
        param = "file_id" if "file_id" in sizes else sizes[1]
        raise BadRequest(f"{sizes[0]} and {sizes[1]} were given; send one of them", param=param)
    if wanted.file_id is not None:
        file = await named_file(asked, wanted.file_id)
        return Size(size=file.size, text=await _sample(asked.services, file))
    text = None if wanted.input is None else utf8(wanted.input, "input", "input")
    if text is not None and wanted.bytes is not None and len(text) > wanted.bytes:
        raise BadRequest(f"the sample has {len(text)} bytes, and the text {wanted.bytes}", param="bytes")
    return Size(tokens=wanted.tokens, size=wanted.bytes, text=text)


async def _sample(services: Services, file: FileRecord) -> bytes:
    """A sample of a file: all of a short one, of a long one PIECES pieces at equal distances."""
    if file.size <= SAMPLE_BYTES:
        begins, length = [0], file.size
    else:
        length = SAMPLE_BYTES // PIECES
        begins = [(file.size - length) * place // (PIECES - 1) for place in range(PIECES)]
    sample = bytearray()
    for begin in begins:
        async with aclosing(services.files.read(file.segments, begin, begin + length)) as pieces:
            async for piece in pieces:
                sample += piece
    return bytes(sample)
