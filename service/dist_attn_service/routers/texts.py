"""/v1/embeddings and its kin of other servers, /tokenize, /detokenize and /v1/estimate: texts that come whole."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dist_attn import __version__
from dist_attn.wire.specs import LONGEST_TEXT
from dist_attn_api.types import Detokenized, Embedding, EmbeddingList, Estimate, Tokenized, Usage
from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import parse_tokens, utf8
from dist_attn_service.dependencies import ModelServices, Services
from dist_attn_service.encodings.embeddings import Vectors
from dist_attn_service.encodings.estimates import PIECES, Size
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.routers.incoming import Asked, Incoming, json_response, named_file
from dist_attn_service.routers.openapi import ANY_TEXT, TEXT, described
from dist_attn_service.schemas.documents import (
    ByTypeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    EstimateOptions,
    EstimateRequest,
    TextsRequest,
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
    wanted = await asked.json(EmbeddingRequest)
    vectors, model = await _vectors(asked, wanted)

    def written() -> Response:
        rows: list[Any] = vectors.as_base64() if wanted.encoding_format == "base64" else vectors.as_numbers()
        data = [Embedding(index=index, embedding=row) for index, row in enumerate(rows)]
        usage = Usage(prompt_tokens=vectors.tokens, total_tokens=vectors.tokens)
        return json_response(EmbeddingList(model=model, data=data, usage=usage))

    return await asked.services.beside(written)


async def _vectors(
    asked: Incoming, wanted: EmbeddingRequest, name: str = "input", *, as_rows: bool = False
) -> tuple[Vectors, str]:
    """The vectors of a request, which calls its inputs by this name, and the model; `as_rows` as of `embed`.

    Raises: ServiceError.
    """
    services, record = asked.services, asked.record
    served = services.context_for(wanted.model, "embeddings")
    inputs = served.embeddings.prepare(wanted, name)
    record.note(inputs=len(inputs))
    terms = asked.terms()
    with asked.place():
        work = served.embeddings.embed(
            inputs, record.request_id, terms, as_rows=as_rows, named=lambda n: (f"{name}[{n}]", name), zeros=True
        )
        vectors = await while_connected(asked.body, work)
    services.count(record, "embedding", vectors.tokens)
    if wanted.dimensions not in (None, served.model.hidden_size):
        vectors = vectors.shortened(wanted.dimensions, unit=not as_rows)
    return vectors, served.model.id


@router.post(
    "/embed",
    tags=["embeddings"],
    response_model=list[list[float]],
    summary="Embed texts, as text-embeddings-inference does",
    openapi_extra=described(TextsRequest),
)
async def embed_texts(asked: Asked) -> Response:
    """The vectors of /v1/embeddings by themselves; unless `normalize` is false they have length 1."""
    wanted = await asked.json(TextsRequest)
    vectors, _ = await _vectors(asked, wanted.wanted(), "inputs", as_rows=True)
    if wanted.normalize is not False:
        vectors = vectors.shortened(None)
    return await asked.services.beside(lambda: json_response(vectors.as_numbers()))


@router.post(
    "/v2/embed",
    tags=["embeddings"],
    response_model=dict[str, Any],
    summary="Embed texts, as Cohere does",
    openapi_extra=described(ByTypeRequest),
)
async def embed_by_type(asked: Asked) -> Response:
    """The vectors of /v1/embeddings by type."""
    wanted = await asked.json(ByTypeRequest)
    vectors, _ = await _vectors(asked, wanted.wanted(), "texts")
    forms: dict[str, Callable[[], list[Any]]] = {"float": vectors.as_numbers, "base64": vectors.as_base64}

    def written() -> Response:
        rows: dict[str, list[Any]] = {name: forms[name]() for name in wanted.embedding_types or ["float"]}
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": vectors.tokens}}
        told = {"id": asked.record.request_id, "response_type": "embeddings_by_type", "meta": meta}
        return json_response({**told, "embeddings": rows, "texts": wanted.texts})

    return await asked.services.beside(written)


@router.get("/info", tags=["embeddings"], summary="The encoder, as text-embeddings-inference tells it")
async def info(asked: Asked) -> dict[str, Any]:
    """The model that makes vectors, and how much it takes at once."""
    model, settings = asked.services.encoder.model, asked.services.settings
    limits = {"max_client_batch_size": settings.embedding_inputs, "max_concurrent_requests": settings.open_requests}
    longest = model.max_tokens or LONGEST_TEXT
    return {**limits, "max_input_length": longest, "auto_truncate": True, "model_id": model.id, "version": __version__}


@router.post(
    "/tokenize",
    tags=["tokens"],
    response_model=Tokenized | list[list[dict[str, Any]]],
    summary="Cut a text into tokens",
    openapi_extra=described(TokenizeRequest),
)
async def tokenize(asked: Asked) -> Response:
    """The tokens of a text, which may be empty; with `inputs` as text-embeddings-inference tells them."""
    services = asked.services
    wanted = await asked.json(TokenizeRequest)
    served = services.context_for(wanted.model, "embeddings" if wanted.inputs else "")
    if (wanted.prompt is None) == (wanted.inputs is None):
        missing = wanted.prompt is None
        words, code = ("prompt is missing", Code.MISSING_PARAMETER) if missing else ("inputs is a text too", None)
        raise BadRequest(f"{words}; send one of prompt and inputs", code=code, param="prompt" if missing else "inputs")
    framed = wanted.add_special_tokens is not False and served.model.writes
    if wanted.inputs is not None:
        texts = [wanted.inputs] if isinstance(wanted.inputs, str) else wanted.inputs
        if len(texts) > (limit := services.settings.embedding_inputs):
            raise BadRequest(f"inputs holds {len(texts)} texts; one request takes at most {limit}", param="inputs")
        return json_response([await _text_tokens(asked, served, text, framed=framed) for text in texts])
    text = utf8(wanted.prompt or "", "prompt", "prompt")
    tokens = await served.tokeniser.whole(text, framed=framed)
    strings = await served.tokeniser.texts(tokens) if wanted.return_token_strs else None
    longest = served.model.max_tokens or LONGEST_TEXT  # clients want a number

    def written() -> Response:
        return json_response(
            Tokenized(count=len(tokens), max_model_len=longest, tokens=tokens.tolist(), token_strs=strings)
        )

    return await services.beside(written)


async def _text_tokens(asked: Incoming, served: ModelServices, text: str, *, framed: bool) -> msgspec.Raw:
    tokens = await served.tokeniser.whole(utf8(text, "inputs", "inputs"), framed=framed)
    strings = await served.tokeniser.texts(tokens)

    def written() -> msgspec.Raw:
        special = {*served.tokeniser.special_tokens.values()}
        pairs = zip(tokens.tolist(), strings, strict=True)
        told = [{"id": token, "text": string, "special": token in special} for token, string in pairs]
        return msgspec.Raw(msgspec.json.encode(told))

    return await asked.services.beside(written)


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
