"""What the service answers about jobs and estimates, as frozen values. Units: seconds, bytes, tokens."""

from typing import Any, Literal

import msgspec

from dist_attn_client.objects import Value

__all__ = [
    "Estimate",
    "Figure",
    "Job",
    "JobEvent",
    "JobPage",
    "JobProgress",
    "MemoryEstimate",
]


class JobProgress(Value, frozen=True):
    """How far a job is; `rows` are those that are safe on disk."""

    tokens: int
    rows: int
    fraction: float
    expected_tokens: int | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None


class Job(Value, frozen=True):
    """A job. `error` is the service's error object where it failed."""

    id: str
    kind: str
    model: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    created_at: float
    expires_at: float
    input_bytes: int
    progress: JobProgress
    last_event: int
    started_at: float | None = None
    ended_at: float | None = None
    cancel_requested: bool = False
    attempts: int = 0
    error: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ("succeeded", "failed", "cancelled")


class JobPage(Value, frozen=True):
    """Some of a caller's jobs."""

    data: list[Job]
    has_more: bool


class JobEvent(Value, frozen=True):
    """What happened to a job; `data` has the members of the event beside its type and time."""

    number: int
    type: str
    at: float
    data: dict[str, Any]


class Figure(Value, frozen=True):
    """A figure with the bounds it is thought to keep, and where it comes from."""

    value: float
    low: float
    high: float
    source: str


class MemoryEstimate(Value, frozen=True, kw_only=True):
    """Where a rank's memory goes. Units: bytes.

    `loading` is what is held while weights are read, before there is a state; `peak` is `process` and the larger of it
    and the other parts together.
    """

    process: int
    weights: int
    state: int
    activations: int
    exchange: int
    loading: int = 0  # of a service that does not say
    peak: int


class Estimate(Value, frozen=True):
    """What work would take if it were sent now. Units: seconds; `output_bytes` by format."""

    model: str
    tokens: Figure
    rows: int
    seconds: Figure
    queue_seconds: float
    total_seconds: Figure
    output_bytes: dict[str, int]
    ranks: int | None = None
    memory_bytes_per_rank: MemoryEstimate | None = None
    notes: list[str] = msgspec.field(default_factory=list)
