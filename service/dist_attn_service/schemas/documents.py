"""The requests about documents: encodings, embeddings, tokens, estimates and jobs."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from dist_attn_service.schemas.base import (
    MAX_WINDOW,
    MOST,
    Cut,
    Granularity,
    Input,
    ModelName,
    Pooling,
    Position,
    Query,
    QueryNumber,
    RowFormatName,
    digits,
    optional,
)
from dist_attn_service.schemas.completions import HowSoon, Inputs
from dist_attn_service.schemas.neutral_fields import UNUSED, EmptyList, NeutralEmbedding, NeutralRerank, only

MOST_BOUNDARIES = 1_000_000
MOST_SEARCHED = 256
ShortText = Annotated[str, Field(min_length=1, max_length=8192, description="at most 8,192 characters")]
FILE_INSTEAD = "a file of the caller in place of `input`"


Boundaries = Annotated[
    Annotated[list[Annotated[int, Field(ge=1, le=MOST)]], Field(fail_fast=True)] | None,
    Field(
        min_length=1,
        max_length=MOST_BOUNDARIES,
        description="in place of `granularity` and `window`: rising byte offsets at which rows end, up to 1,000,000; "
        "the last row ends with the document",
    ),
]


class EmbeddingRequest(NeutralEmbedding, Input):
    """OpenAI's embeddings request: the mean of the hidden states over each input, or a text encoder's vector of it."""

    model: ModelName = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = optional("default float; base64 is of little-endian float32")
    dimensions: Annotated[int, Field(ge=1)] | None = optional(
        "fewer than the model has: so many of a vector's first numbers, scaled to length 1"
    )
    user: str | None = UNUSED


class TextsRequest(Input):
    """The embeddings request of text-embeddings-inference."""

    inputs: Inputs
    normalize: bool | None = optional("vectors of length 1; default true")
    dimensions: Annotated[int, Field(ge=1)] | None = optional("so many of a vector's first numbers")
    truncate: bool | None = UNUSED
    truncation_direction: Literal["right", "Right"] | None = only('"right": a text is read from its beginning')
    prompt_name: None = only("null: no model here has prompts of its own; put the words before the text")

    def wanted(self) -> EmbeddingRequest:
        """Make the request to /v1/embeddings that asks for this."""
        return EmbeddingRequest(input=self.inputs, dimensions=self.dimensions)


class ByTypeRequest(Input):
    """Cohere's embeddings request, of texts."""

    model: ModelName = None
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    embedding_types: Annotated[list[Literal["float", "base64"]], Field(fail_fast=True)] | None = optional(
        "default float; others are not made"
    )
    output_dimension: Annotated[int, Field(ge=1)] | None = optional("`dimensions` of /v1/embeddings")
    input_type: str | None = UNUSED
    truncate: Literal["NONE", "END"] | None = only('"NONE" or "END": a text is read as far as the model reads')
    images: EmptyList | None = only("an empty list: texts are read")
    inputs: EmptyList | None = only("an empty list: send texts")
    max_tokens: None = only("null: a text is read as far as the model reads")
    priority: int | None = UNUSED

    def wanted(self) -> EmbeddingRequest:
        """Make the request to /v1/embeddings that asks for this."""
        return EmbeddingRequest(model=self.model, input=self.texts, dimensions=self.output_dimension)


class TokenizeRequest(Input):
    """A text to be cut into tokens, including those that frame every text unless `add_special_tokens` is false."""

    model: ModelName = None
    prompt: str | None = optional("may be empty")
    inputs: str | Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = optional(
        "in place of `prompt`, by text-embeddings-inference: the answer has a list of tokens for each text; up to "
        "`limits.embedding_inputs`"
    )
    add_special_tokens: bool | None = optional(
        "false leaves out the tokens that a downloaded model's files put around every text; default true"
    )
    return_token_strs: bool | None = optional("each token's text too")


class DetokenizeRequest(Input):
    """Tokens to be put together again."""

    model: ModelName = None
    tokens: Annotated[list[int], Field(fail_fast=True, description="ids of the vocabulary")]


class EncodingOptions(Query):
    """The choice of rows to return, in the query of any request or in a JSON body."""

    model: ModelName = None
    granularity: Granularity = Field(default="window", description="where rows end")
    window: Annotated[int, BeforeValidator(digits)] = Field(
        default=512, ge=1, le=MAX_WINDOW, description="tokens per row; default 512"
    )
    pooling: Pooling = Field(default="mean", description="of the hidden states in a row")
    format: RowFormatName = Field(
        default="ndjson", description="left out: what `Accept` prefers of their types, else ndjson"
    )
    from_row: QueryNumber = Field(
        default=0, description="leave out the rows before this one, which are computed all the same"
    )

    @property
    def sizes(self) -> tuple[int | None, Pooling | None]:
        """Window and pooling, None where they were left out."""
        named = self.model_fields_set
        return self.window if "window" in named else None, self.pooling if "pooling" in named else None


class EncodingRequest(EncodingOptions):
    """The JSON form of an encoding: a text, or a file that was uploaded; a long text is better sent as the body."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input: str | None = optional("the text, not empty")
    file_id: str | None = optional(FILE_INSTEAD)
    boundaries: Boundaries = None


def _countable(value: Any) -> Any:
    if value in get_args(Cut):
        raise ValueError(
            "how many such rows a text has is known when it is read; leave it out for tokens and seconds, which are "
            "the same"
        )
    return value


CountableRows = Annotated[Literal["token", "window", "document"], BeforeValidator(_countable)]


class EstimateRequest(Input):
    """Planned work: its size in one of five ways, and what is asked of it.

    `input` alone is the whole text; beside `bytes` it is a sample of a text of that size. `file_id` is a file of the
    caller: the tokens of a short one are counted, those of a long one estimated from samples.
    """

    model: ModelName = None
    input: str | None = Field(default=None, description="the text, or beside `bytes` a sample of it")
    file_id: str | None = Field(default=None, description="a file in place of `input` and `bytes`")
    bytes: Position | None = Field(default=None, description="size of the text")
    tokens: Position | None = Field(default=None, description="size in tokens")
    granularity: CountableRows = Field(default="window", description="the rows whose bytes are asked for")
    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW, description="tokens per row; default as in encodings")
    max_tokens: int | None = Field(default=None, ge=1, le=MOST, description="of a completion; left out: an encoding")


class SearchDocument(Input):
    """One of the documents of a search, in one of three ways; without `id` it is known by its number."""

    id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    text: str | None = None
    file_id: str | None = Field(default=None, description="a file")
    job_id: str | None = Field(default=None, description="the encoding that a job has made, or still makes")


def _not_too_many(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_SEARCHED:
        raise ValueError(
            f"one search takes {MOST_SEARCHED} documents at most, not {len(value)}; put short texts into one document, "
            "with an empty line between them, and take granularity=paragraph"
        )
    return value


class SearchRequest(HowSoon, Input):
    """A query, and the documents whose rows may answer it; `granularity` and `window` are for those without a job."""

    model: ModelName = None
    query: ShortText
    documents: Annotated[
        list[SearchDocument | str],
        Field(min_length=1, max_length=MOST_SEARCHED, fail_fast=True, description="up to 256"),
        BeforeValidator(_not_too_many),
    ]
    mode: Literal["hybrid", "dense", "lexical"] = Field(
        default="hybrid", description="by words, by vectors, or by both"
    )
    top_k: Annotated[int, Field(ge=1, le=100)] = Field(default=10, description="how many rows; default 10")
    granularity: Literal["window", "document", Cut] = Field(default="window", description="where rows end")
    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW, description="tokens per row; default as in encodings")


class RerankText(Input):
    """A text as an object, whose other members are ignored."""

    model_config = ConfigDict(extra="ignore")

    text: str


RerankTexts = Annotated[list[str | RerankText], Field(min_length=1, fail_fast=True)]


class RerankRequest(HowSoon, NeutralRerank, Input):
    """A query and documents to put in order, as Cohere and Jina send them, or text-embeddings-inference (`texts`)."""

    model: ModelName = None
    query: ShortText
    documents: RerankTexts | None = optional("not empty, up to `limits.embedding_inputs`")
    texts: RerankTexts | None = Field(default=None, description="another name of `documents`")
    top_n: Annotated[int, Field(ge=1, le=MOST)] | None = optional("so many of the best; left out: all")
    return_documents: bool | None = optional("each result with its document")
    return_text: bool | None = Field(default=None, description="another name of `return_documents`")
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        default=None, description="of a document so many tokens are read"
    )


class JobRequest(Input):
    """Work that outlives its connection: the encoding of `input` or of a file, or a completion."""

    model: ModelName = None
    input: str | None = Field(default=None, description="the text of an encoding")
    file_id: str | None = optional(f"{FILE_INSTEAD}, which is copied")
    granularity: Granularity | None = optional("where rows end")
    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW, description="tokens per row")
    pooling: Pooling | None = optional("of the hidden states in a row")
    boundaries: Boundaries = None
    completion: dict[str, Any] | None = Field(
        default=None, description="the body of a request to /v1/completions, without stream"
    )


class EstimateOptions(Query):
    """The options of an estimate beside a body of text, which is the `input`."""

    model: ModelName = None
    bytes: QueryNumber | None = None
    granularity: CountableRows = "window"
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW), BeforeValidator(digits)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST), BeforeValidator(digits)] | None = None


class EventOptions(Query):
    """The choice of events: those after number `after`."""

    after: QueryNumber = Field(default=0, description="leave out the events up to this one")


class ResultOptions(Query):
    """The format of a job's rows, and the first row to send."""

    format: RowFormatName | None = optional("left out: what `Accept` prefers of their types, else ndjson")
    from_row: QueryNumber = Field(default=0, description="leave out the rows before this one")
