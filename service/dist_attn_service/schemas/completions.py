"""The JSON that goes in and out; unknown keys are refused, nothing is converted silently."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from dist_attn_service.schemas.base import Input, Output, digits
from dist_attn_service.schemas.drawing import AnswerOptions
from dist_attn_service.schemas.neutral_fields import NeutralCompletion, NeutralEmbedding

__all__ = [
    "Choice",
    "ChoiceLogprobs",
    "Completion",
    "CompletionChunk",
    "CompletionRequest",
    "CompletionUsage",
    "DetokenizeRequest",
    "Detokenized",
    "Embedding",
    "EmbeddingList",
    "EmbeddingRequest",
    "EncodingOptions",
    "EncodingRequest",
    "EncodingSummary",
    "ModelCard",
    "ModelList",
    "ProgressChunk",
    "PromptProgress",
    "PromptTokensDetails",
    "RankState",
    "Readiness",
    "ServerSentEvent",
    "ServiceState",
    "TokenizeRequest",
    "Tokenized",
    "Usage",
    "UsageChunk",
    "Version",
]

MAX_WINDOW = 1_000_000


class Usage(Output):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


# ---- /v1/completions ---------------------------------------------------------------------------


_TEXTS_SCHEMA = {
    "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ],
}
Texts = Annotated[Any, WithJsonSchema(_TEXTS_SCHEMA)]


class CompletionRequest(NeutralCompletion, AnswerOptions, Input):
    """OpenAI's completion request; `priority`, `deadline_seconds` and `return_progress` are our extensions, `top_k`,
    `min_tokens` and `ignore_eos` vLLM's.
    """

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class PromptProgress(Output):
    """How far the prompts have been read: tokens in all, of these from a cache, and read; milliseconds since."""

    total: int
    cache: int
    processed: int
    time_ms: int


class PromptTokensDetails(Output):
    """Of the prompts' tokens, those that were in a stored state and not read again."""

    cached_tokens: int = 0


class CompletionUsage(Output):
    """Tokens in, tokens out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class ChoiceLogprobs(Output):
    """Per token: its text, natural log-probability, those of the likeliest tokens, and where it begins in the text.

    The first token of a prompt has null in their place.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(Output):
    """One piece of text, or all of it."""

    index: int = 0
    text: str
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ServerSentEvent(Output):
    """One event of a stream; `data` is JSON, or `[DONE]` at the end. Only those of a job have a type and an id."""

    data: str
    event: str = "message"
    id: str | None = None


class _CompletionHead(Output):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str


class CompletionChunk(_CompletionHead):
    """One event of a streamed completion."""

    choices: list[Choice]


class ProgressChunk(_CompletionHead):
    """An event before the first text, when progress was asked for."""

    choices: list[Choice] = Field(default=[], max_length=0)
    prompt_progress: PromptProgress


class UsageChunk(_CompletionHead):
    """The last event of a streamed completion, when usage was asked for; any other, when it was asked for in each."""

    choices: list[Choice] = Field(default=[])
    usage: CompletionUsage


class Completion(_CompletionHead):
    """A whole completion."""

    choices: list[Choice]
    usage: CompletionUsage


# ---- /v1/embeddings, /tokenize, /detokenize ----------------------------------------------------


class EmbeddingRequest(NeutralEmbedding, Input):
    """OpenAI's embeddings request: the mean of the hidden states over each input, or a text encoder's vector of it."""

    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class Embedding(Output):
    """One vector: numbers, or their little-endian float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Output):
    """A vector for each input, in order."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class TokenizeRequest(Input):
    """A text to be cut into tokens; a text never becomes a special token, so there are none to add."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(Output):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Input):
    """Tokens to be put together again."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class Detokenized(Output):
    """The text of tokens."""

    prompt: str


# ---- /v1/encodings -----------------------------------------------------------------------------


class EncodingOptions(BaseModel):
    """Which rows to return; in the query of any request, or in a JSON body."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    granularity: Literal["token", "window", "document"] = "window"
    window: Annotated[int, BeforeValidator(digits)] = Field(
        default=512, ge=1, le=MAX_WINDOW, description="tokens per row"
    )
    pooling: Literal["mean", "last"] = "mean"
    format: Literal["ndjson", "arrow", "npy"] = "ndjson"
    from_row: Annotated[int, BeforeValidator(digits)] = Field(
        default=0, ge=0, le=1 << 53, description="leave out the rows before this one, which are computed all the same"
    )


class EncodingRequest(EncodingOptions):
    """The JSON form of an encoding: a text, or a file that was uploaded; a long text is better sent as the body."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input: str | None = None
    file_id: str | None = Field(default=None, description="a file in place of `input`")


class EncodingSummary(Output):
    """The last line of a complete answer."""

    object: Literal["encoding.summary"] = "encoding.summary"
    tokens: int
    rows: int
    model: str
    usage: Usage


# ---- what there is, and how it is --------------------------------------------------------------


class ModelCard(Output):
    """One model: the routes of /v1 that it answers, the numbers in a vector of it, and how much it reads at once.

    `max_model_len` counts tokens, those put around a text included; null: any length. `num_layers` is what a softmax
    model of this size would keep keys and values in.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dist-attn"
    capabilities: list[str]
    embedding_size: int
    max_model_len: int | None = None
    num_layers: int | None = None


class ModelList(Output):
    """All models: the one that is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Readiness(Output):
    """The engine can take work."""

    ready: Literal[True] = True
    model: str
    backend: str
    ranks: int
    active: int
    queued: int


class Version(Output):
    """The version of this program."""

    version: str


class RankState(Output):
    """One rank as the controller sees it; `step` is the last one it has finished.

    `busy_seconds` are those of its steps since it started, waiting for other ranks in them included.
    """

    rank: int
    pid: int
    phase: str
    step: int
    heartbeat_age_seconds: float
    progress_age_seconds: float
    peak_rss_bytes: int
    busy_seconds: float


class ServiceState(Output):
    """What the service and its engine are doing now; the engine's figures are null while it has not answered.

    `lost_groups` counts how often the ranks were lost, `replayed_tokens` what was read or drawn a second time for that.
    """

    ready: bool
    reason: str
    version: str
    model: str
    uptime_seconds: float
    open_requests: int
    waiting_requests: int
    spool_bytes: int
    stored_sessions: int
    stored_states: int
    stored_bytes: int
    backend: str | None = None
    epoch: int | None = None
    step: int | None = None
    queued: int | None = None
    sessions: int | None = None
    tokens_per_second: float | None = None
    lost_groups: int | None = None
    replayed_tokens: int | None = None
    ranks: list[RankState] = Field(default=[])
