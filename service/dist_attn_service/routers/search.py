"""POST /v1/search and /v1/rerank: passages that answer a query, and documents in order of how well they answer it."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.search_types import RankedText, RerankResults, SearchResults
from dist_attn_service.base.errors import BadRequest, Code, ServiceError
from dist_attn_service.encodings.documents import DocumentSource
from dist_attn_service.http.exchange import while_connected
from dist_attn_service.routers.incoming import Asked, Incoming, json_response, named_source
from dist_attn_service.routers.openapi import described
from dist_attn_service.schemas.documents import (
    RerankRequest,
    RerankText,
    SearchDocument,
    SearchRequest,
)
from dist_attn_service.search.service import Searched, SearchQuery, check_size

router = APIRouter(tags=["search"])
Form = Callable[[Any], Any]  # turns results into what is sent


@router.post(
    "/v1/search",
    response_model=SearchResults,
    summary="Find passages that answer a query",
    openapi_extra=described(SearchRequest),
)
async def search(asked: Asked) -> Response:
    """Find rows of texts, files and jobs by their words, by their vectors, or by both."""
    services, wanted = asked.services, await asked.json(SearchRequest)
    served = services.context_for(wanted.model, "search")
    spec = served.rows(wanted.granularity, wanted.window)
    _check_query(wanted.query)
    documents = [await _document(asked, one, str(place)) for place, one in enumerate(wanted.documents)]
    counts = Counter(one.id for one in documents)
    if twice := next((one_id for one_id, count in counts.items() if count > 1), None):
        raise BadRequest(
            f"two documents have the id {twice!r}; give each its own: one without an id has its number, from '0' on",
            param="documents",
        )
    name, terms = asked.record.request_id, asked.terms(wanted)
    query = SearchQuery(wanted.query, wanted.mode, wanted.top_k, spec, asked.caller, name, terms)
    size = sum(one.source.size or 0 for one in documents if one.source is not None)
    check_size(size)
    return await _answered(asked, size, lambda hold: services.search_by(served).search(documents, query, hold))


async def _document(asked: Incoming, one: SearchDocument | str, number: str) -> Searched:
    """One document of a search, with its source or its job.

    Raises: BadRequest unless it is given in one way, and for an empty one; NotFound, TooLarge, ServiceError (415)
        for one that is not plain text.
    """
    if isinstance(one, str):
        one = SearchDocument(text=one)
    given = [name for name in ("text", "file_id", "job_id") if getattr(one, name) is not None]
    if len(given) != 1:
        raise BadRequest(
            f"documents[{number}] has {' and '.join(given) or 'no text'}; give it one of text, file_id and job_id",
            param="documents",
        )
    source: DocumentSource | None = None
    if one.job_id is None:
        try:
            source = await named_source(asked, one.text, one.file_id)
        except ServiceError as error:
            place = f"documents[{number}].{given[0]}"
            words = error.message.removeprefix("input")
            words = place + words if words != error.message else f"{place}: {words}"
            status, headers = error.status, error.headers
            raise ServiceError(words, code=error.code, status=status, param="documents", headers=headers) from None
    return Searched(one.id if one.id is not None else number, one.job_id, source)


@router.post(
    "/v1/rerank",
    response_model=RerankResults,
    summary="Put documents in order of how well they answer a query",
    openapi_extra=described(RerankRequest),
)
@router.post(
    "/v2/rerank",
    response_model=RerankResults,
    summary="The same, where Cohere's clients look for it",
    openapi_extra=described(RerankRequest),
)
async def rerank(asked: Asked) -> Response:
    """Rank documents by the cosine of the vectors that /v1/embeddings gives the query and each of them."""
    return await _reranked(asked, await asked.json(RerankRequest))


@router.post(
    "/rerank",
    response_model=RerankResults | list[RankedText],
    summary="The same, where clients of text-embeddings-inference look for it",
    openapi_extra=described(RerankRequest),
)
async def rerank_texts(asked: Asked) -> Response:
    """Rank documents like /v1/rerank; where they are called `texts`, the answer is their list by itself."""
    wanted = await asked.json(RerankRequest)
    return await _reranked(asked, wanted, _bare if wanted.texts is not None else None)


def _bare(results: RerankResults) -> list[RankedText]:
    return [
        RankedText(index=one.index, score=one.relevance_score, text=one.document.text if one.document else None)
        for one in results.results
    ]


async def _reranked(asked: Incoming, wanted: RerankRequest, form: Form | None = None) -> Response:
    services = asked.services
    served = services.context_for(wanted.model, "rerank")
    _check_query(wanted.query)
    documents = wanted.texts if wanted.documents is None else wanted.documents
    if documents is None:
        raise BadRequest("documents is missing; send a list of texts", code=Code.MISSING_PARAMETER, param="documents")
    if wanted.documents is not None and wanted.texts is not None:
        raise BadRequest("texts is another name of documents; send one of them", param="texts")
    texts = [one.text if isinstance(one, RerankText) else one for one in documents]
    name, limit = "texts" if wanted.documents is None else "documents", services.settings.embedding_inputs
    if len(texts) > limit:
        raise BadRequest(f"{name} holds {len(texts)} texts; one request takes at most {limit}", param=name)
    if "" in texts:
        raise BadRequest(f"{name}[{texts.index('')}] is empty; send a text", code=Code.EMPTY_INPUT, param=name)
    told = bool(wanted.return_documents or wanted.return_text)
    asked.record.note(inputs=len(texts))
    terms = asked.terms(wanted)
    request_id = asked.record.request_id
    return await _answered(
        asked,
        sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + 4 * served.model.hidden_size * len(texts),
        lambda _: services.search_by(served).rerank(
            wanted.query, texts, wanted.top_n, request_id, terms, told=told, longest=wanted.max_tokens_per_doc
        ),
        form,
    )


def _check_query(query: str) -> None:
    if not query.strip():
        raise BadRequest("query is blank; send a word", code=Code.EMPTY_INPUT, param="query")


async def _answered(
    asked: Incoming,
    size: int,
    work: Callable[[Callable[[int], None]], Awaitable[SearchResults | RerankResults]],
    form: Form | None = None,
) -> Response:
    """Answer with the result of `work`, which ends if the client leaves; it holds `size` bytes of texts, or more.

    Raises: ServiceError (429) where searches under way hold too much.
    """
    with asked.place():
        hold = asked.services.search_memory.hold(asked.record.holder, asked.record.at_end.append)
        hold(size)
        results = await while_connected(asked.body, work(hold))
    asked.services.count(asked.record, "embedding", results.usage.total_tokens)
    return await asked.services.beside(json_response, results if form is None else form(results))
