"""The JSON of sessions."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dist_attn_service.schemas.base import Input, Output, digits
from dist_attn_service.schemas.completions import Choice, CompletionUsage
from dist_attn_service.schemas.drawing import DrawingOptions, HowSoon

__all__ = [
    "SESSION_BODIES",
    "AppendOptions",
    "AppendProgress",
    "AppendRequest",
    "AppendSummary",
    "CheckpointList",
    "CheckpointObject",
    "CreateSession",
    "DeletedSession",
    "ForkSession",
    "GenerateChunk",
    "GenerateEnd",
    "GenerateRequest",
    "GenerateSummary",
    "Generation",
    "ListOptions",
    "SessionList",
    "SessionObject",
    "StateOptions",
]

Position = Annotated[int, Field(ge=0, le=1 << 53)]
QueryPosition = Annotated[int, Field(ge=0, le=1 << 53), BeforeValidator(digits)]
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class CreateSession(Input):
    """What a new session is called, and how long it lives when nobody uses it."""

    model: str | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    ttl_seconds: Annotated[float, Field(ge=1)] | None = None


class ForkSession(Input):
    """Where a fork begins, which must be a checkpoint; without a position where the session stands."""

    position: Position | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    ttl_seconds: Annotated[float, Field(ge=1)] | None = None


class SessionObject(Output):
    """A session. Units: times in seconds since 1970, positions in tokens; `state` is the entity tag of its state."""

    id: str
    object: Literal["session"] = "session"
    model: str
    position: int
    checkpoints: list[int]
    created_at: int
    expires_at: int
    busy: bool
    name: str | None
    metadata: dict[str, str]
    parent: str | None
    parent_position: int | None


class SessionList(Output):
    """A page of a caller's sessions, by id."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedSession(Output):
    """That a session is no more."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class CheckpointObject(Output):
    """A position that a session can be forked from or read at; `etag` is that of the snapshot file."""

    object: Literal["session.checkpoint"] = "session.checkpoint"
    position: int
    created_at: int
    bytes: int
    etag: str


class CheckpointList(Output):
    """The checkpoints of a session, by position."""

    object: Literal["list"] = "list"
    data: list[CheckpointObject]


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ListOptions(_Query):
    """Which page of sessions."""

    limit: Annotated[int, Field(ge=1, le=100), BeforeValidator(digits)] = 20
    after: Annotated[str, Field(max_length=100)] = ""


class StateOptions(_Query):
    """Which state: that of a checkpoint, or the newest."""

    position: QueryPosition | None = None


class AppendOptions(_Query):
    """Where the caller thinks the session stands; in the query of any append, or in a JSON body."""

    expected_position: QueryPosition | None = None


class AppendRequest(HowSoon, Input):
    """The JSON form of an append; for long texts send the text itself as the body."""

    input: str
    expected_position: Position | None = None


class AppendProgress(Output):
    """How far an append has come: all up to `position` is read, all up to `kept` is in the store."""

    object: Literal["session.append.progress"] = "session.append.progress"
    position: int
    kept: int


class RestoreFacts(Output):
    """What going on from the stored state came to."""

    restored_position: int
    recomputed_tokens: int
    bit_exact: bool
    reason: str


class AppendSummary(RestoreFacts):
    """The last line of a complete answer: the tokens [start, position) are in the session, once.

    `replayed` says that this append was complete before, and nothing was fed now.
    """

    object: Literal["session.append"] = "session.append"
    session: str
    model: str
    start: int
    position: int
    tokens: int
    checkpoints: list[int]
    replayed: bool = False


class GenerateRequest(DrawingOptions, Input):
    """How the model goes on with the text of a session; the options are those of completions."""

    expected_position: Position | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class GenerateSummary(RestoreFacts):
    """Where the session stands after what was drawn: the tokens [start, position) are in it."""

    id: str
    start: int
    position: int
    replayed: bool = False


class _GenerateHead(Output):
    id: str
    created: int
    model: str


class GenerateChunk(_GenerateHead):
    """One event of a streamed generation."""

    object: Literal["session.completion.chunk"] = "session.completion.chunk"
    choices: list[Choice]


class _GenerateTail(_GenerateHead):
    usage: CompletionUsage
    session: GenerateSummary


class GenerateEnd(_GenerateTail):
    """The last event of a streamed generation."""

    object: Literal["session.completion.chunk"] = "session.completion.chunk"
    choices: list[Choice] = Field(default=[], max_length=0)


class Generation(_GenerateTail):
    """A whole generation."""

    object: Literal["session.completion"] = "session.completion"
    choices: list[Choice]


SESSION_BODIES: tuple[type[BaseModel], ...] = (CreateSession, ForkSession, AppendRequest, GenerateRequest)
"""What clients send as JSON."""
