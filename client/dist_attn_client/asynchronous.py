"""The asynchronous client: what a service offers, as coroutines and asynchronous iterators."""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, Unpack, cast, final

import httpx
import numpy as np
import numpy.typing as npt

from dist_attn_api.search_types import RerankResults, SearchResults
from dist_attn_api.types import (
    Choice,
    Completion,
    Detokenized,
    EmbeddingList,
    EncodingSummary,
    Estimate,
    Model,
    ModelList,
    PromptProgress,
    Status,
    Tokenized,
)
from dist_attn_client.attempts import DEFAULT_RETRY, Retry
from dist_attn_client.encodings import (
    EncodingProgress,
    Row,
    RowOptions,
    RowsPlan,
    check_keywords,
    row_query,
    what_to_encode,
)
from dist_attn_client.errors import NotOurAnswer, Overloaded
from dist_attn_client.exchange import Exchange
from dist_attn_client.files import AsyncFiles
from dist_attn_client.jobs import AsyncJobs
from dist_attn_client.plan import Call, path_of, told
from dist_attn_client.sessions import AsyncSessions
from dist_attn_client.sources import Document
from dist_attn_client.streams import AsyncStream
from dist_attn_client.texts import DrawnEnd, Priority, Sampling, TextPlan, drawing_body
from dist_attn_client.transport import AsyncTransport, Transport

DEFAULT_URL = "http://127.0.0.1:8000"
SILENCE_S = 600.0
LONGEST_DEADLINE_S = 2_592_000.0  # the service accepts no longer one: it is then kept by this client alone


class WorkSize(TypedDict, total=False):
    """Work to estimate: its size in `tokens`, in bytes (`size`), as a text or a file, and what is asked of it.

    `text` beside `size` is a sample of it; with `max_tokens` it is a completion, otherwise an encoding.
    """

    tokens: int | None
    size: int | None
    text: str | None
    file_id: str | None
    granularity: Literal["token", "window", "document"] | None
    window: int | None
    max_tokens: int | None
    model: str | None


class SearchOptions(TypedDict, total=False):
    """The options of a search; those of rows apply to the documents that the search encodes."""

    mode: Literal["hybrid", "dense", "lexical"] | None
    top_k: int | None
    granularity: Literal["window", "document", "sentence", "paragraph", "chapter"] | None
    window: int | None
    model: str | None
    priority: Priority | None


class Flows:
    """The methods of both clients, over either transport."""

    def __init__(
        self, transport: Transport, url: str, *, key: str | None = None, retry: Retry = DEFAULT_RETRY, silence_s: float
    ) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._exchange = Exchange(transport, url, headers, retry=retry, silence_s=silence_s)
        self.sessions = AsyncSessions(self._exchange)
        self.files = AsyncFiles(self._exchange)
        self.jobs = AsyncJobs(self._exchange)

    def encode(
        self,
        document: Document | None = None,
        *,
        file_id: str | None = None,
        boundaries: Sequence[int] | None = None,
        from_row: int = 0,
        priority: Priority | None = None,
        deadline_s: float | None = None,
        on_progress: Callable[[EncodingProgress], None] | None = None,
        **options: Unpack[RowOptions],
    ) -> AsyncStream[Row, EncodingSummary]:
        """The rows of a document of any length, or of a file of the service; `end` is the summary.

        After a lost connection the document is sent again, and the rows go on with the next one, with the same bits.
        `boundaries` are rising byte offsets at which rows end, of a `str` or a file of the service.

        Raises: InputError for a document that cannot be read, ClientError.
        """
        source, body = what_to_encode(document, file_id, boundaries)
        query, headers = row_query(options), _terms(deadline_s, priority)

        def call(row: int) -> Call:
            asked = query | {"format": "ndjson", "from_row": row or None}
            path, sent = "/v1/encodings", plan.sent
            return Call("POST", path, asked, headers, json=body, source=source, on_sent=sent, repeatable=True)

        plan = RowsPlan(call, from_row=from_row, on_progress=on_progress)
        return self._exchange.stream(plan, deadline_s)

    async def search(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, str]],
        *,
        deadline_s: float | None = None,
        **options: Unpack[SearchOptions],
    ) -> SearchResults:
        """The rows of documents that answer a query best, by their words, their vectors or both.

        Documents are texts, or mappings with one of `text`, `file_id` and `job_id`, and perhaps an `id`. A job's rows
        and text are searched as it keeps them, and nothing is encoded again. Raises: ClientError.
        """
        check_keywords("search", options, SearchOptions)
        given = [{"text": one} if isinstance(one, str) else dict(one) for one in documents]
        body = told({"query": query, "documents": given, **options})
        call = Call("POST", "/v1/search", headers=_terms(deadline_s), json=body, repeatable=True)
        return await self._exchange.value(call, SearchResults, deadline_s)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        return_documents: bool = False,
        model: str | None = None,
        deadline_s: float | None = None,
    ) -> RerankResults:
        """Documents in order of how near their vectors are to the query's, the best first. Raises: ClientError."""
        options = {"top_n": top_n, "return_documents": return_documents or None, "model": model}
        body = told({"query": query, "documents": list(documents), **options})
        call = Call("POST", "/v1/rerank", headers=_terms(deadline_s), json=body, repeatable=True)
        return await self._exchange.value(call, RerankResults, deadline_s)

    async def complete(
        self, prompt: str | list[int], *, deadline_s: float | None = None, **options: Unpack[Sampling]
    ) -> Completion:
        """The continuation of a prompt of any length. Raises: ClientError."""
        body = drawing_body(options, prompt=prompt)
        call = Call("POST", "/v1/completions", headers=_terms(deadline_s), json=body, repeatable=True)
        return await self._exchange.value(call, Completion, deadline_s)

    def stream(
        self,
        prompt: str | list[int],
        *,
        deadline_s: float | None = None,
        on_progress: Callable[[PromptProgress], None] | None = None,
        **options: Unpack[Sampling],
    ) -> AsyncStream[Choice, DrawnEnd]:
        """The continuation of a prompt, in pieces while it is drawn; `on_progress` hears how the prompt is read.

        After a lost connection it is drawn again by the same seed, and goes on with the text that was not there yet.

        Raises: ClientError.
        """
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if on_progress is not None:
            more["return_progress"] = True
        body = drawing_body(options, prompt=prompt, **more)
        call = Call("POST", "/v1/completions", headers=_terms(deadline_s), json=body, repeatable=True)
        return self._exchange.stream(TextPlan(call, on_progress), deadline_s)

    async def embed(
        self, texts: Sequence[str], *, model: str | None = None, deadline_s: float | None = None
    ) -> npt.NDArray[np.float32]:
        """A vector of each text, float32 [N, D], by `/v1/embeddings`. Raises: ClientError."""
        body = told({"input": list(texts), "encoding_format": "base64", "model": model})
        call = Call("POST", "/v1/embeddings", headers=_terms(deadline_s), json=body, repeatable=True)
        vectors = sorted((await self._exchange.value(call, EmbeddingList, deadline_s)).data, key=lambda v: v.index)
        try:
            rows = [np.frombuffer(b64decode(cast(str, v.embedding), validate=True), "<f4") for v in vectors]
            return np.stack(rows).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise NotOurAnswer(
                f"POST /v1/embeddings: vectors in base64 were asked for; what came is none: {error}"
            ) from None

    async def tokenise(self, text: str) -> list[int]:
        """The tokens of a text, as the served model has them. Raises: ClientError."""
        call = Call("POST", "/tokenize", json={"prompt": text}, repeatable=True)
        return (await self._exchange.value(call, Tokenized)).tokens

    async def detokenise(self, tokens: Sequence[int]) -> str:
        """The text of tokens. Raises: ClientError."""
        call = Call("POST", "/detokenize", json={"tokens": list(tokens)}, repeatable=True)
        return (await self._exchange.value(call, Detokenized)).prompt

    async def estimate(self, *, deadline_s: float | None = None, **work: Unpack[WorkSize]) -> Estimate:
        """Estimate work by its size in tokens or bytes, its text, or a file; with `max_tokens` it is a completion.

        `text` beside `size` is a sample of it. Nothing is started. Raises: ClientError.
        """
        check_keywords("estimate", work, WorkSize)
        names = {"size": "bytes", "text": "input"}  # of the API, where they differ
        body = {names.get(name, name): value for name, value in told(work).items()}
        return await self._exchange.value(
            Call("POST", "/v1/estimate", json=body, repeatable=True), Estimate, deadline_s
        )

    async def models(self) -> list[Model]:
        """The models that are served. Raises: ClientError."""
        return (await self._exchange.get("/v1/models", ModelList)).data

    async def model(self, name: str) -> Model:
        """A model by its id. Raises: Missing, ClientError."""
        return await self._exchange.get(path_of("v1", "models", name), Model)

    async def status(self, *, deadline_s: float | None = None) -> Status:
        """Ranks, queue, sessions and speed. Raises: ClientError."""
        return await self._exchange.get("/v1/status", Status, deadline_s)

    async def ready(self) -> bool:
        """Return whether the engine takes work now. Raises: Unreachable, ClientError."""
        attempts = self._exchange.attempts(None)
        try:
            await self._exchange.whole(Call("GET", "/readyz", repeatable=True), attempts)
        except Overloaded:
            return False
        return True

    async def close(self) -> None:
        """Close all connections."""
        await self._exchange.transport.close()


@final
class AsyncClient(Flows):
    """A dist-attn service, for asynchronous programs.

    `key` is sent as `Authorization: Bearer`, `retry` says how patiently a request is sent again, `silence_s` how long
    nothing may come or go. `http` is an httpx client of your own, for proxies, certificates or other transports; it is
    not closed with this one.

    Raises: InputError for a URL that is none.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | None = None,
        retry: Retry = DEFAULT_RETRY,
        silence_s: float = SILENCE_S,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(AsyncTransport(http), url, key=key, retry=retry, silence_s=silence_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.close()


def _terms(deadline_s: float | None, priority: Priority | None = None) -> dict[str, str]:
    """The headers that say how urgent a request is, and for how long its answer is wanted."""
    headers: dict[str, str] = {} if priority is None else {"x-request-priority": priority}
    if deadline_s is not None and 0 < deadline_s <= LONGEST_DEADLINE_S:
        headers["x-request-deadline"] = f"{deadline_s:.3f}"
    return headers
