"""The JSON of every answer, said once: the service builds these values, its clients parse into them.

Units: times in seconds since 1970, positions and sizes of prompts in tokens, sizes of files in bytes.
docs/reference/service.md lists what each holds. A client passes over members that it does not know, so that a
service may add some; a member with a default may be missing in the answer of an older service.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, dataclass_transform

FinishReason = Literal["stop", "length"]
ListName = Literal["list"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Answer:
    """Base of all: each subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        """Make the subclass a frozen dataclass."""
        dataclass(frozen=True, kw_only=True)(cls)


class Usage(Answer):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class PromptTokensDetails(Answer):
    """The number of the prompts' tokens that were in a stored state and not read again."""

    cached_tokens: int = 0


class CompletionUsage(Answer):
    """The tokens of the prompts, and those that were drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class PromptProgress(Answer):
    """Tokens of the prompts, `processed` with those of the `cache` so far; milliseconds since the start."""

    total: int
    cache: int
    processed: int
    time_ms: int


class ChoiceLogprobs(Answer):
    """Per token: its text, natural log-probability, those of the likeliest tokens, and where it begins in the text.

    The first token of a prompt has null in their place.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(Answer):
    """One text, or a piece of it; `finish_reason` stands with its last piece."""

    index: int = 0
    text: str
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(Answer):
    """A whole completion."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


class EncodingSummary(Answer):
    """The last line of a complete encoding; it counts the whole document, whichever rows were asked for."""

    object: Literal["encoding.summary"] = "encoding.summary"
    tokens: int
    rows: int
    model: str
    usage: Usage


class Embedding(Answer):
    """One vector: numbers, or their little-endian float32 bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Answer):
    """A vector for each input, in order."""

    object: ListName = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class Tokenized(Answer):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class Session(Answer):
    """A session, and where it stands; `revision` is that of its state's model, null without a state and in lists."""

    id: str
    object: Literal["session"] = "session"
    model: str
    position: int
    checkpoints: list[int]
    created_at: int
    expires_at: int
    busy: bool = False
    name: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    parent: str | None = None
    parent_position: int | None = None
    revision: str | None = None


class SessionList(Answer):
    """A page of a caller's sessions, by id."""

    object: ListName = "list"
    data: list[Session]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class Deleted(Answer):
    """The answer to a deletion; `object` says what was deleted."""

    id: str
    object: str
    deleted: Literal[True] = True


class Checkpoint(Answer):
    """A position that a session can be forked from or read at; `etag` is that of its snapshot file."""

    object: Literal["session.checkpoint"] = "session.checkpoint"
    position: int
    created_at: int
    bytes: int
    etag: str


class CheckpointList(Answer):
    """The checkpoints of a session, by position."""

    object: ListName = "list"
    data: list[Checkpoint]


class AppendProgress(Answer):
    """The progress of an append: all up to `position` is read, all up to `kept` is in the store."""

    object: Literal["session.append.progress"] = "session.append.progress"
    position: int
    kept: int


class RestoreFacts(Answer):
    """The position of the stored state from which work went on, and the tokens that had to be computed again."""

    restored_position: int = 0
    recomputed_tokens: int = 0
    bit_exact: bool = True
    reason: str = ""


class AppendSummary(RestoreFacts):
    """The end of a complete append: tokens [start, position) are in the session; `replayed`: of a former try."""

    object: Literal["session.append"] = "session.append"
    session: str
    model: str
    start: int
    position: int
    tokens: int
    checkpoints: list[int]
    replayed: bool = False


class GenerationSummary(RestoreFacts):
    """The end of a complete generation: tokens [start, position) are in the session; `replayed`: of a former try."""

    id: str
    start: int
    position: int
    replayed: bool = False


class Generation(Answer):
    """A whole generation in a session."""

    id: str
    object: Literal["session.completion"] = "session.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    session: GenerationSummary

    @property
    def text(self) -> str:
        """The text that was drawn."""
        return self.choices[0].text


class TextEvent(TypedDict, total=False):
    """An event of a streamed completion or generation; a member that it says nothing about is absent."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    prompt_progress: PromptProgress
    session: GenerationSummary
    error: dict[str, Any]


class File(Answer):
    """A file; `expires_at` is null for one that stays until it is deleted."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    mime_type: str = ""
    status: Literal["processed"] = "processed"


class FileList(Answer):
    """A page of files."""

    object: ListName = "list"
    data: list[File]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class Feeding(Answer):
    """The session that an upload feeds: its text begins at `start`, is read up to `position`, safe at `checkpoint`."""

    id: str
    state: Literal["waiting", "feeding", "done", "failed"]
    start: int
    position: int
    checkpoint: int
    error: str | None = None


class Upload(Answer):
    """An upload; `received_bytes` are on disk, `file` is there once it is completed, `session` where it feeds one."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    received_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    mime_type: str
    status: Literal["pending", "completed"]
    file: File | None = None
    session: Feeding | None = None


class Figure(Answer):
    """A figure with the bounds it is thought to keep, and where it comes from.

    `source` is given, counted (exact), sample, measured (of what this service has read lately), or planned (by the
    rates of `dist-attn plan`, as nothing was measured).
    """

    value: float
    low: float
    high: float
    source: str


class MemoryEstimate(Answer):
    """The parts of a rank's memory, by the formulas of `dist-attn plan`. Units: bytes.

    `loading` is held while weights are read, before there is a state; `peak` is `process` plus the larger of `loading`
    and the sum of the other parts.
    """

    process: int
    weights: int
    state: int
    activations: int
    exchange: int
    loading: int = 0
    peak: int


class Estimate(Answer):
    """The time, memory and output of work if it were sent now. Units: seconds, bytes.

    `seconds` is reading (and drawing) alone; `queue_seconds` what work that is under way adds; `total_seconds` both.
    `memory_bytes_per_rank` is null for models that have no formulas. `output_bytes` is by format.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    ranks: int | None = None
    tokens: Figure
    rows: int
    seconds: Figure
    queue_seconds: float
    total_seconds: Figure
    memory_bytes_per_rank: MemoryEstimate | None = None
    output_bytes: dict[str, int]
    notes: list[str] = field(default_factory=list)


class JobProgress(Answer):
    """The progress of a job. `rows` counts the safe ones; `expected_tokens` may be an estimate, null: not known yet."""

    tokens: int
    expected_tokens: int | None = None
    rows: int
    fraction: float
    tokens_per_second: float | None = None
    eta_seconds: float | None = None


class Job(Answer):
    """A job; at `expires_at` it is forgotten, with its results. `error` is the error object of one that failed."""

    id: str
    object: Literal["job"] = "job"
    kind: Literal["encoding", "completion"]
    model: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    expires_at: float
    cancel_requested: bool = False
    attempts: int = 0
    input_bytes: int
    progress: JobProgress
    error: dict[str, Any] | None = None
    last_event: int

    @property
    def ended(self) -> bool:
        """Return whether nothing more will happen to the job."""
        return self.status in ("succeeded", "failed", "cancelled")


class JobList(Answer):
    """Jobs of a caller, in order of arrival."""

    object: ListName = "list"
    data: list[Job]
    has_more: bool


class Model(Answer):
    """One model: the routes of /v1 that it answers, the numbers in a vector of it, and how much it reads at once.

    `max_model_len` counts tokens, those put around a text too; null: any length. `num_layers`: how many would keep keys
    and values in a softmax model. `state_token_bytes`: what a token adds to a state at most; null: no engine said it.
    `revision`: the first digits of the SHA-256 of its weights; null: it has no states, or no engine said it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dist-attn"
    capabilities: list[str]
    embedding_size: int
    max_model_len: int | None = None
    num_layers: int | None = None
    state_token_bytes: int | None = None
    revision: str | None = None


class ModelList(Answer):
    """All served models, under each of their names; the one that draws text comes first."""

    object: ListName = "list"
    data: list[Model]


class Readiness(Answer):
    """The engine can take work; `encoder` says the same of the second model, null where there is none."""

    ready: Literal[True] = True
    model: str
    backend: str
    ranks: int
    active: int
    queued: int
    encoder: "Readiness | None" = None


class Version(Answer):
    """The version of this program."""

    version: str


class Rank(Answer):
    """One rank as the controller sees it: the last step that it finished, the time of its steps, waits included."""

    rank: int
    pid: int
    phase: str
    step: int
    heartbeat_age_seconds: float
    progress_age_seconds: float
    peak_rss_bytes: int
    busy_seconds: float = 0.0
    device: str = ""


class EngineStatus(Answer):
    """The status of a model's engine, nulls until it has answered; `replayed_tokens` were read or drawn again.

    Of several engines the counts are sums, and the ranks those of the one that is next to get work.
    """

    ready: bool
    reason: str
    model: str
    backend: str | None = None
    epoch: int | None = None
    step: int | None = None
    queued: int | None = None
    sessions: int | None = None
    tokens_per_second: float | None = None
    lost_groups: int | None = None
    replayed_tokens: int | None = None
    ranks: list[Rank] = field(default_factory=list)
    address: str | None = None


class Status(EngineStatus):
    """The status of the service and its engine; `encoder` is that of a second model, and `ready` means both.

    `engines` has each engine of a model that has several, with its address.
    """

    version: str
    uptime_seconds: float
    open_requests: int
    waiting_requests: int
    spool_bytes: int
    stored_sessions: int
    stored_states: int
    stored_bytes: int
    encoder: EngineStatus | None = None
    engines: list[EngineStatus] = field(default_factory=list)
