"""The JSON of answers of searches and rerankings."""

from typing import Literal

from dist_attn_api.types import Answer, ListName, Usage


class SearchPart(Answer):
    """The place of a passage in one kind of search, counted from 1, and its score there."""

    rank: int
    score: float


class SearchParts(Answer):
    """The places of a passage by kind of search; null where it has none, or the kind was not asked for."""

    lexical: SearchPart | None = None
    dense: SearchPart | None = None


class SearchResult(Answer):
    """A row that answers: ranges in tokens and bytes of its document, and of words in characters of `text`.

    `text_cut`: the row is longer, and `text` its beginning. `section`: the page or heading that it begins in.
    """

    document: str
    index: int
    score: float
    parts: SearchParts
    start: int
    stop: int
    byte_start: int
    byte_stop: int
    text: str
    words: list[tuple[int, int]]
    text_cut: bool = False
    section: str | None = None


class SearchedDocument(Answer):
    """A document, and how many of its rows were searched; `complete` is false while its job still encodes."""

    id: str
    rows: int
    complete: bool


class SearchResults(Answer):
    """The passages that answer a query, the best first."""

    object: Literal["search.results"] = "search.results"
    model: str
    mode: Literal["hybrid", "dense", "lexical"]
    documents: list[SearchedDocument]
    results: list[SearchResult]
    usage: Usage


class RerankDocument(Answer):
    """A document of a reranking."""

    text: str


class RerankResult(Answer):
    """The place of a document in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RankedText(Answer):
    """The place of a text in the request and its score, in the shape of text-embeddings-inference."""

    index: int
    score: float
    text: str | None = None


class RerankResults(Answer):
    """Documents, the best first."""

    object: ListName = "list"
    model: str
    results: list[RerankResult]
    usage: Usage
