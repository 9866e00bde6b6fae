"""Searches and rerankings: documents are encoded for a request, or have been by a job; the query is read alone."""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from dist_attn.text.base import TokenArray
from dist_attn.text.byte_offsets import ByteOffsets
from dist_attn.text.documents import Section, sections_at
from dist_attn.text.ranking import Floats, directions, fused, places_of, ranks
from dist_attn.wire.messages import OpenWork, RowSpec
from dist_attn_api.search_types import (
    RerankDocument,
    RerankResult,
    RerankResults,
    SearchedDocument,
    SearchPart,
    SearchParts,
    SearchResult,
    SearchResults,
)
from dist_attn_api.types import Usage
from dist_attn_service.base.errors import BadRequest, NotFound, TooLarge
from dist_attn_service.base.parsing import DeadlineExceeded, RequestTerms, utf8
from dist_attn_service.base.tasks import task_group
from dist_attn_service.encodings.documents import DocumentSource
from dist_attn_service.encodings.embeddings import EmbeddingService
from dist_attn_service.encodings.encoding_run import EncodingRun, RowBlock, pieces_of
from dist_attn_service.engine.port import EngineKind
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.jobs.api import JobServices
from dist_attn_service.search.passages import Passages, Pool
from dist_attn_service.text.tokenising import Piece, TextMark, cut

__all__ = ["SearchQuery", "SearchService", "Searched", "check_size"]

MIB = 1 << 20
ENCODED_BYTES, ENCODED_ROWS = 16 * MIB, 20_000  # of documents that one request encodes
SEARCHED_BYTES, SEARCHED_ROWS = 64 * MIB, 200_000  # of all documents of one request
KEPT_BYTES = 64 * MIB  # of texts of jobs whose words this process keeps counted
ROW_BYTES = 32  # of a row's range, beside its vector
TOLD_BYTES = 1 << 17  # of a row's text in a result
AT_ONCE = 64  # documents of one request in the engine, which reads short ones together
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Searched:
    """A document of a search, under the id that results name: the job that has encoded it, or its source."""

    id: str
    job: str | None = None
    source: DocumentSource | None = None


@dataclass(frozen=True)
class SearchQuery:
    """A query, with its caller and options: `mode` is hybrid, dense or lexical, `spec` is for documents that are not
    encoded yet, and `name` is the request's id in the log.
    """

    text: str
    mode: Literal["hybrid", "dense", "lexical"]
    top: int
    spec: RowSpec
    caller: str
    name: str
    terms: RequestTerms


@dataclass
class _Found:
    """The documents of one request as they are ready, by their places, and the tokens that it has read."""

    query: SearchQuery
    hold: Callable[[int], None]  # takes so many bytes of the memory of all searches
    kind: EngineKind | None = None  # of the engines that read for it
    passages: dict[int, Passages] = field(default_factory=dict)
    complete: dict[int, bool] = field(default_factory=dict)
    bytes: int = 0
    rows: int = 0
    tokens: int = 0

    def take_bytes(self, size: int) -> None:
        """Count bytes of texts. Raises: TooLarge for more than one request may encode."""
        self.bytes += size
        check_size(self.bytes)

    def take_rows(self, count: int, dim: int) -> None:
        """Count rows of so many numbers. Raises: TooLarge for more than one request may encode; as `hold`."""
        self.rows += count
        if self.rows > ENCODED_ROWS:
            raise _too_large(f"the documents of this request have more than {ENCODED_ROWS} rows")
        self.hold(count * (ROW_BYTES + 4 * dim))


@final
class SearchService:
    """The service of searches and rerankings; keeps the word counts of jobs that were searched last."""

    def __init__(self, context: ServiceContext, embeddings: EmbeddingService, jobs: JobServices) -> None:
        self._context = context
        self._embeddings = embeddings
        self._jobs = jobs
        self._places = asyncio.Semaphore(context.settings.embeddings_at_once)
        self._kept: OrderedDict[str, Passages] = OrderedDict()

    # ---- searches ------------------------------------------------------------------------------

    async def search(
        self, documents: Sequence[Searched], query: SearchQuery, hold: Callable[[int], None]
    ) -> SearchResults:
        """The passages that answer a query best.

        `hold` takes the bytes of jobs' texts and of rows.

        Raises: ServiceError for documents that cannot be found or are too large, and when the engine fails; what
            `hold` raises.
        """
        async with _in_time(query.terms):
            found, query_D = _Found(query, hold), None
            for place, one in enumerate(documents):
                if one.job is not None:
                    await self._take_job(one.job, place, found)
            if query.mode != "lexical":
                await self._context.watch.until_ready()
                found.kind = self._context.engine.kind()
                query_D, found.tokens = await self._read_query(query, found.kind)
            waiting = iter([(place, one.source) for place, one in enumerate(documents) if one.source is not None])
            async with task_group() as group:
                for _ in range(min(AT_ONCE, len(documents))):
                    group.create_task(self._encode(waiting, found))
            pool = Pool.of([found.passages[place] for place in range(len(documents))])
            with _deleted_is_not_found():
                results = await self._context.beside(_results, pool, query, query_D, [one.id for one in documents])
        told = [
            SearchedDocument(id=one.id, rows=stop - start, complete=found.complete.get(place, True))
            for place, (one, (start, stop)) in enumerate(zip(documents, pairwise(pool.edges), strict=True))
        ]
        usage = Usage(prompt_tokens=found.tokens, total_tokens=found.tokens)
        return SearchResults(
            model=self._context.model.id, mode=query.mode, documents=told, results=results, usage=usage
        )

    async def _read_query(self, query: SearchQuery, kind: EngineKind | None) -> tuple[npt.NDArray[np.float32], int]:
        """The query's vector, read alone, and its number of tokens. Raises: BadRequest for a query without any."""
        text = utf8(query.text, "query", "query")
        # The rows' mean is subtracted from it as from them, so it must keep its length as they do.
        vectors = await self._embeddings.embed([text], query.name, query.terms, as_rows=True, named=_named, only=kind)
        return vectors.rows_ND[0], vectors.tokens

    async def _take_job(self, name: str, place: int, found: _Found) -> None:
        """Add the rows of a job that are safe by now, with their words counted.

        Raises: NotFound, BadRequest for a completion and for another model's, TooLarge.
        """
        try:
            record = await self._jobs.get(found.query.caller, name)
        except NotFound as error:
            raise NotFound(error.message, param="documents") from None
        if record.kind != "encoding":
            raise BadRequest(f"the job {name[:80]!r} draws a completion; name one that encodes", param="documents")
        if record.model != self._context.model.identity:
            raise BadRequest(
                f"the job {name[:80]!r} was read by the model {record.model}, this search is by "
                f"{self._context.model.identity}: name that job's model, or encode the text again",
                param="documents",
            )
        sizes = [*((each.size, each.rows) for each in found.passages.values()), (record.input_bytes, record.rows)]
        size, rows = (sum(numbers) for numbers in zip(*sizes, strict=True))
        if size > SEARCHED_BYTES or rows > SEARCHED_ROWS:
            raise _too_large(
                f"the documents have {size} bytes and {rows} rows; one search goes through {SEARCHED_BYTES} bytes and "
                f"{SEARCHED_ROWS} rows at most"
            )
        found.hold(record.input_bytes)
        rows_of, text_of = self._jobs.results.kept(name, record)
        passages = self._kept.pop(name, None) or Passages(rows_of, text_of, record.input_bytes)
        passages.size = record.input_bytes  # which grows while the job is received
        self._kept[name] = passages
        while sum(each.size for each in self._kept.values()) > KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        async with passages.lock:
            if not passages.rows:
                passages.sections = await self._context.beside(self._jobs.results.sections, name)
            while passages.rows < record.rows:
                with _deleted_is_not_found():
                    await self._context.beside(passages.grow, record.rows)
            found.passages[place] = dataclasses.replace(passages)  # a copy: other searches let the original grow
        found.complete[place] = record.state == "succeeded"

    async def _encode(self, waiting: Iterator[tuple[int, DocumentSource]], found: _Found) -> None:
        """Encode documents, one after the other, and count their words."""
        spec = found.query.spec
        for place, source in waiting:
            parts: list[bytes] = []
            async with self._places, aclosing(source.pieces) as chunks:
                async for chunk in chunks:
                    found.take_bytes(len(chunk))
                    parts.append(chunk)
                data = b"".join(parts)
                parts.clear()
                pieces = pieces_of(self._context.tokeniser, spec, cut(data, PIECE_BYTES), TextMark())
                if found.query.mode == "lexical":
                    blocks = await _without_vectors(spec, pieces, found)
                else:
                    blocks = await self._rows(data, pieces, found)
            block = _joined(blocks)
            passages = _in_memory(block, data, source.sections)
            while passages.rows < len(block):
                await self._context.beside(passages.grow, len(block))
            found.passages[place] = passages

    async def _rows(self, data: bytes, pieces: AsyncGenerator[Piece], found: _Found) -> list[RowBlock]:
        """Encode a document in the engine, and return its rows."""
        query, dim = found.query, self._context.model.hidden_size
        blocks: list[RowBlock] = []

        async def put(block: RowBlock) -> None:
            found.take_rows(len(block), dim)
            blocks.append(block)

        with self._context.workload.document(size=len(data)) as load:
            run = EncodingRun(query.spec, dim, put, load)
            work = OpenWork(query.name, rows=query.spec, terms=query.terms.for_engine())
            async with aclosing(pieces), self._context.open(work, only=found.kind) as stream:
                await run.work(stream, pieces)
        found.tokens += run.tokens
        return blocks

    # ---- rerankings ----------------------------------------------------------------------------

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top: int | None,
        name: str,
        terms: RequestTerms,
        *,
        told: bool,
        longest: int | None = None,
    ) -> RerankResults:
        """Rank documents by the cosine of their vectors and the query's, the best first; `told`: with their texts.

        Of each document `longest` tokens are read.

        Raises: BadRequest for texts without tokens, ServiceError when the engine fails.
        """
        texts: list[bytes | TokenArray] = [utf8(query, "query", "query")]
        texts += [utf8(text, f"documents[{place}]", "documents") for place, text in enumerate(documents)]
        async with _in_time(terms):
            if longest is not None:
                await self._context.watch.until_ready()
                texts[1:] = [
                    (await self._embeddings.tokens(text, *_named(n)))[:longest] for n, text in enumerate(texts) if n
                ]
            vectors = await self._embeddings.embed(texts, name, terms, named=_named)
        directions_ND = directions(vectors.rows_ND)
        scores_N = directions_ND[1:] @ directions_ND[0]
        order = np.argsort(-scores_N, kind="stable")[:top].tolist()
        results = [
            RerankResult(
                index=place,
                relevance_score=round(float(scores_N[place]), 6),
                document=RerankDocument(text=documents[place]) if told else None,
            )
            for place in order
        ]
        usage = Usage(prompt_tokens=vectors.tokens, total_tokens=vectors.tokens)
        return RerankResults(model=self._context.model.id, results=results, usage=usage)


def check_size(size: int) -> None:
    """Refuse documents of more bytes than one request may encode. Raises: TooLarge."""
    if size > ENCODED_BYTES:
        raise _too_large(f"the documents of this request have more than {ENCODED_BYTES} bytes")


def _too_large(words: str) -> TooLarge:
    return TooLarge(f"{words}; encode long texts by jobs, search fewer at once or take longer rows", param="documents")


@asynccontextmanager
async def _in_time(terms: RequestTerms) -> AsyncIterator[None]:
    """End the block at the request's deadline. Raises: DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(terms.deadline_at):  # both are of the monotonic clock
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before all of it was done") from None


def _named(place: int) -> tuple[str, str]:
    """The name of an embedded text in refusals, and its parameter; the query is at place 0."""
    return (f"documents[{place - 1}]", "documents") if place else ("query", "query")


@contextmanager
def _deleted_is_not_found() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound("a job was deleted while it was searched", param="documents") from None


async def _without_vectors(spec: RowSpec, pieces: AsyncGenerator[Piece], found: _Found) -> list[RowBlock]:
    """The rows of a document whose vectors are not needed."""
    offsets, edges = ByteOffsets(spec), [np.zeros((1, 2), np.int64)]
    async with aclosing(pieces):
        async for piece in pieces:
            ends_N2 = offsets.push(piece.byte_lengths, piece.tokens if spec.marked else None)
            found.take_rows(len(ends_N2), 0)
            edges.append(ends_N2)
    # a text's last row ends with it, and may be one that was counted
    edges_N2 = np.unique(np.concatenate([*edges, [[offsets.tokens, offsets.bytes]]]), axis=0)
    ranges_N4 = np.column_stack((edges_N2[:-1, 0], edges_N2[1:, 0], edges_N2[:-1, 1], edges_N2[1:, 1]))
    found.take_rows(len(ranges_N4) - sum(map(len, edges)) + 1, 0)
    return [RowBlock(0, ranges_N4, np.empty((len(ranges_N4), 0), np.float32))]


def _in_memory(block: RowBlock, data: bytes, sections: Sequence[Section]) -> Passages:
    """The passages of a document whose rows and text are in memory; none is counted yet."""

    def read(first: int, count: int) -> RowBlock:
        return block.after(first).first(count)

    def read_text(start: int, stop: int) -> bytes:
        return data[start:stop]

    return Passages(read, read_text, len(data), sections=sections)


def _joined(blocks: list[RowBlock]) -> RowBlock:
    if not blocks:
        return RowBlock(0, np.empty((0, 4), np.int64), np.empty((0, 0), np.float32))
    return RowBlock(
        0,
        np.concatenate([block.ranges_N4 for block in blocks]),
        np.concatenate([block.vectors_ND for block in blocks]),
    )


def _results(
    pool: Pool, query: SearchQuery, query_D: npt.NDArray[np.float32] | None, ids: list[str]
) -> list[SearchResult]:
    """The best passages of a pool, with their places by words and by vectors."""
    parts: dict[str, tuple[Floats, npt.NDArray[np.int64]]] = {}
    scores_N = shares_N = np.zeros(pool.total)
    if query.mode != "dense":
        scores_N, shares_N = pool.bm25(query.text)
        parts["lexical"] = scores_N, ranks(scores_N, scores_N > 0)
    if query_D is not None:
        cosines_N = pool.cosines(query_D)
        parts["dense"] = cosines_N, ranks(cosines_N, np.ones(pool.total, dtype=np.bool_))
        scores_N = fused(cosines_N, shares_N)
    has_N = np.logical_or.reduce([rank_N > 0 for _, rank_N in parts.values()])
    order_N, words = ranks(scores_N, has_N), pool.telling(query.text)
    results = []
    for passage in np.argsort(np.where(order_N > 0, order_N, pool.total + 1), kind="stable")[: query.top].tolist():
        if not order_N[passage]:
            break
        document, row = pool.place(passage)
        start, stop, byte_start, byte_stop = pool.documents[document].read(row, 1).ranges_N4[0].tolist()
        cut = byte_stop - byte_start > TOLD_BYTES
        text = pool.documents[document].text(byte_start, byte_start + TOLD_BYTES if cut else byte_stop)
        told = {
            name: SearchPart(rank=int(rank_N[passage]), score=round(float(part_N[passage]), 6))
            for name, (part_N, rank_N) in parts.items()
            if rank_N[passage]
        }
        results.append(
            SearchResult(
                document=ids[document],
                index=row,
                score=round(float(scores_N[passage]), 6),
                parts=SearchParts(**told),
                start=start,
                stop=stop,
                byte_start=byte_start,
                byte_stop=byte_stop,
                section=sections_at(pool.documents[document].sections, [byte_start])[0],
                text=text.rstrip("\ufffd") if cut else text,
                words=places_of(text, words),
                text_cut=cut,
            )
        )
    return results
