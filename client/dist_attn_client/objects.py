"""What the service answers, as frozen values; members that this client does not know are passed over.

Units: times in seconds since 1970, positions in tokens. docs/reference/service.md says what each of them means.
"""

from typing import Any, Literal

import msgspec

__all__ = [
    "Choice",
    "Completion",
    "EmbeddingList",
    "EncodingSummary",
    "File",
    "FilePage",
    "Model",
    "PromptProgress",
    "Rank",
    "Status",
    "Tokens",
    "TokensText",
    "Usage",
    "Value",
]


class Value(msgspec.Struct, frozen=True):
    """Base of what the service answers."""


class Usage(Value, frozen=True):
    """Tokens read and drawn."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EncodingSummary(Value, frozen=True):
    """What an encoding came to; it counts the whole document, whichever rows were asked for."""

    tokens: int
    rows: int
    model: str
    usage: Usage


class Embedding(Value, frozen=True):
    """The vector of one text: little-endian float32, which base64 brings."""

    index: int
    embedding: bytes


class EmbeddingList(Value, frozen=True):
    """A vector for each text."""

    data: list[Embedding]


class Tokens(Value, frozen=True):
    """The tokens of a text."""

    tokens: list[int]


class TokensText(Value, frozen=True):
    """The text of tokens."""

    prompt: str


# ---- texts ---------------------------------------------------------------------------------------


class Choice(Value, frozen=True):
    """One continuation, or a piece of it; `finish_reason` stands with its last piece."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: dict[str, Any] | None = None


class PromptProgress(Value, frozen=True):
    """How far the prompts are read. Units: tokens; milliseconds."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Completion(Value, frozen=True):
    """A whole completion."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


# ---- files ---------------------------------------------------------------------------------------


class File(Value, frozen=True):
    """A file; `expires_at` is None for one that stays until it is deleted."""

    id: str
    bytes: int
    created_at: float
    filename: str
    purpose: str
    expires_at: float | None = None
    mime_type: str = ""


class FilePage(Value, frozen=True):
    """Some of a caller's files."""

    data: list[File]
    has_more: bool


# ---- what there is, and how it is ----------------------------------------------------------------


class Model(Value, frozen=True):
    """A model that is served; `max_model_len` is None where it reads a text of any length."""

    id: str
    created: float
    capabilities: list[str]
    embedding_size: int
    max_model_len: int | None = None


class ModelList(Value, frozen=True):
    """The models that are served."""

    data: list[Model]


class Rank(Value, frozen=True):
    """One rank; `step` is the last one that it has finished, `busy_seconds` what its steps took."""

    rank: int
    pid: int
    phase: str
    step: int
    heartbeat_age_seconds: float
    progress_age_seconds: float
    peak_rss_bytes: int
    busy_seconds: float = 0.0


class Status(Value, frozen=True):
    """What service and engine are doing; the engine's figures are None while it has not answered."""

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
    ranks: list[Rank] = []
