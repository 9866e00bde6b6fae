"""Embeddings through the engine: each input is one document, and its vector the mean over it, or the model's own."""

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dist_attn.text.base import TokenArray
from dist_attn.wire.floats import shortest_float32
from dist_attn.wire.messages import OpenWork, Rows, RowSpec
from dist_attn.wire.specs import MODEL_POOLING
from dist_attn_service.base.errors import BadRequest, Code, EngineFailure
from dist_attn_service.base.parsing import RequestTerms, parse_texts
from dist_attn_service.base.tasks import task_group
from dist_attn_service.engine.port import EngineKind
from dist_attn_service.engine.run import EngineRun, ServiceContext
from dist_attn_service.schemas.documents import EmbeddingRequest

__all__ = ["EmbeddingService", "Vectors"]

AT_ONCE = 64  # inputs of one request in the engine, which reads short ones together
DOCUMENT = RowSpec(granularity="document", pooling="mean")
SEQUENCE = RowSpec(granularity="document", pooling=MODEL_POOLING)
TINY = 1e-12  # a shorter vector keeps its length, as torch's normalize has it


@dataclass
class Vectors:
    """The vectors of a request, in the order of its inputs, and the tokens of all of them."""

    rows_ND: npt.NDArray[np.float32]
    tokens: int = 0

    def shortened(self, numbers: int | None, *, unit: bool = True) -> "Vectors":
        """The first numbers of each vector, or all; with `unit` scaled to length 1."""
        rows_ND = self.rows_ND[:, :numbers]
        if unit:
            rows_ND = rows_ND / np.maximum(np.linalg.norm(rows_ND, axis=1, keepdims=True), TINY)
        return Vectors(rows_ND, self.tokens)

    def as_numbers(self) -> list[list[float]]:
        """The vectors as numbers with the fewest digits that keep float32."""
        return [shortest_float32(row_D).tolist() for row_D in self.rows_ND]

    def as_base64(self) -> list[str]:
        """The vectors as little-endian float32 in base64, which OpenAI's client asks for by default."""
        return [base64.b64encode(row_D.astype("<f4").tobytes()).decode("ascii") for row_D in self.rows_ND]


def _as_input(place: int) -> tuple[str, str]:
    return f"input[{place}]", "input"


class EmbeddingService:
    """The service of embeddings; all requests together have at most `embeddings_at_once` inputs in the engine."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._places = asyncio.Semaphore(context.settings.embeddings_at_once)

    def prepare(self, request: EmbeddingRequest, name: str = "input") -> list[bytes | TokenArray]:
        """Check the options, and return the inputs, which the request calls by this name.

        Raises: BadRequest naming the parameter.
        """
        model = self._context.model
        if (request.dimensions or 0) > model.hidden_size:
            raise BadRequest(
                f"dimensions={request.dimensions}, but a vector of {model.id!r} has {model.hidden_size} numbers; send "
                "fewer, or leave it out",
                param="dimensions",
            )
        limit = self._context.settings.embedding_inputs
        return parse_texts(request.input, name, self._context.tokeniser.vocab_size, limit, empty=True)

    async def embed(
        self,
        inputs: list[bytes | TokenArray],
        name: str,
        terms: RequestTerms,
        *,
        as_rows: bool = False,
        named: Callable[[int], tuple[str, str]] = _as_input,
        zeros: bool = False,
        only: EngineKind | None = None,
    ) -> Vectors:
        """The vectors of all inputs, some at a time; leaving early cancels what is in the engine.

        `name` is the request's id in the log. With `as_rows` vectors keep their length, to be compared with encoded
        rows. `named` gives the name of an input in refusals, and its parameter. With `zeros` one that has no tokens
        has a vector of zeros where there are others. Engines of one kind read them all: of the kind `only`, where the
        request has other work too.

        Raises: ServiceError when the engine fails.
        """
        model = self._context.model
        await self._context.watch.until_ready()
        if only is None and len(inputs) > 1:
            only = self._context.engine.kind()
        vectors = Vectors(np.empty((len(inputs), model.hidden_size), dtype=np.float32))
        waiting = iter(enumerate(inputs))

        async def work() -> None:
            for place, text in waiting:
                async with self._places:
                    tokens = await self.tokens(text, *named(place), empty=zeros and len(inputs) > 1)
                    if not len(tokens):
                        vectors.rows_ND[place] = 0
                        continue
                    row_D = await self._embed_one(tokens, name, terms, only)
                if model.unit_vectors and not as_rows:
                    row_D = row_D / max(float(np.linalg.norm(row_D)), TINY)
                vectors.rows_ND[place] = row_D
                vectors.tokens += len(tokens) + model.frame_tokens

        async with task_group() as group:
            for _ in range(min(AT_ONCE, len(inputs))):
                group.create_task(work())
        return vectors

    async def tokens(self, text: bytes | TokenArray, where: str, param: str, *, empty: bool = False) -> TokenArray:
        """The tokens of an input, cut where the model stops reading.

        Raises: BadRequest for a text that has none, such as blanks under a tokeniser that drops them, unless `empty`.
        """
        model, tokeniser = self._context.model, self._context.tokeniser
        limit = None if model.reading is None else model.reading.text_tokens
        if isinstance(text, bytes) and limit is None:
            text = await tokeniser.whole(text, framed=model.writes)
        elif isinstance(text, bytes):  # the model frames what it reads
            text = await tokeniser.tokens(text, limit)
        if not len(text) and not empty:
            raise BadRequest(
                f"{where} has no tokens: the tokeniser drops blanks; send a word", code=Code.EMPTY_INPUT, param=param
            )
        return text[:limit]

    async def _embed_one(
        self, tokens: TokenArray, name: str, terms: RequestTerms, only: EngineKind | None
    ) -> npt.NDArray[np.float32]:
        spec = DOCUMENT if self._context.model.reading is None else SEQUENCE
        rows: list[Rows] = []

        async def on_rows(some: Rows) -> None:
            rows.append(some)

        work = OpenWork(name, rows=spec, terms=terms.for_engine(len(tokens)))
        async with self._context.open(work, only=only) as stream:
            await EngineRun(stream, on_rows).work(tokens)
        if [len(some.vectors) for some in rows] != [4 * self._context.model.hidden_size]:
            raise EngineFailure("the engine did not answer an embedding with one row for all of its tokens")
        row_D = np.frombuffer(rows[0].vectors, dtype="<f4")
        if not np.isfinite(row_D).all():
            raise EngineFailure("the engine computed an embedding with a value that is not finite")
        return row_D
