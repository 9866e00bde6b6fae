"""What the service answers about sessions, as frozen values. Units: tokens; times in seconds since 1970."""

from typing import Literal

import msgspec

from dist_attn_client.objects import Choice, Usage, Value

__all__ = [
    "AppendProgress",
    "AppendSummary",
    "Checkpoint",
    "CheckpointList",
    "Feeding",
    "FeedingUpload",
    "Generation",
    "GenerationSummary",
    "Session",
    "SessionPage",
]


class Session(Value, frozen=True):
    """A session, and where it stands."""

    id: str
    model: str
    position: int
    checkpoints: list[int]
    created_at: float
    expires_at: float
    busy: bool = False
    name: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parent: str | None = None
    parent_position: int | None = None


class SessionPage(Value, frozen=True):
    """Some of a caller's sessions."""

    data: list[Session]
    has_more: bool


class Checkpoint(Value, frozen=True):
    """A position that a session can be forked from or read at; `etag` is that of its snapshot file."""

    position: int
    created_at: float
    bytes: int
    etag: str


class CheckpointList(Value, frozen=True):
    """The checkpoints of a session."""

    data: list[Checkpoint]


class AppendProgress(Value, frozen=True):
    """How far an append has come: all up to `position` is read, all up to `kept` is in the store."""

    position: int
    kept: int


class AppendSummary(Value, frozen=True):
    """The tokens [start, position) are in the session, once; `replayed` says that they were there before."""

    session: str
    model: str
    start: int
    position: int
    tokens: int
    checkpoints: list[int]
    replayed: bool = False
    restored_position: int = 0
    recomputed_tokens: int = 0
    bit_exact: bool = True
    reason: str = ""


class Feeding(Value, frozen=True):
    """A session that an upload feeds: its text begins at `start`, is read up to `position`, kept up to `checkpoint`."""

    id: str
    state: Literal["waiting", "feeding", "done", "failed"]
    start: int
    position: int
    checkpoint: int
    error: str | None = None


class FeedingUpload(Value, frozen=True):
    """An upload that feeds a session."""

    session: Feeding | None = None


class GenerationSummary(Value, frozen=True):
    """Where a session stands after what was drawn: the tokens [start, position) are in it."""

    id: str
    start: int
    position: int
    replayed: bool = False
    restored_position: int = 0
    recomputed_tokens: int = 0
    bit_exact: bool = True
    reason: str = ""


class Generation(Value, frozen=True):
    """A whole generation in a session."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage
    session: GenerationSummary

    @property
    def text(self) -> str:
        """The text."""
        return self.choices[0].text
