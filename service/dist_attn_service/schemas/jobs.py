"""The JSON of estimates and jobs."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dist_attn_service.schemas.base import Input, Output, digits
from dist_attn_service.schemas.completions import MAX_WINDOW

__all__ = [
    "Estimate",
    "EstimateRequest",
    "EventOptions",
    "Job",
    "JobList",
    "JobProgress",
    "JobRequest",
    "ListJobs",
    "MemoryEstimate",
    "Range",
    "ResultOptions",
]

MOST = 1 << 53


class EstimateRequest(Input):
    """Work that somebody thinks of: its size in one of five ways, and what is asked of it.

    `input` alone is the whole text; beside `bytes` it is a sample of a text of that size. `file_id` is a file of the
    caller: a short one is counted, of a long one samples are.
    """

    model: str | None = None
    input: str | None = Field(default=None, description="the text, or beside `bytes` a sample of it")
    file_id: str | None = Field(default=None, description="a file in place of `input` and `bytes`")
    bytes: Annotated[int, Field(ge=0, le=MOST)] | None = Field(default=None, description="size of the text")
    tokens: Annotated[int, Field(ge=0, le=MOST)] | None = Field(default=None, description="size in tokens")
    granularity: Literal["token", "window", "document"] = "window"
    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW, description="tokens per row; default as in encodings")
    max_tokens: int | None = Field(default=None, ge=1, le=MOST, description="of a completion; left out: an encoding")


class Range(Output):
    """A figure with the bounds it is thought to keep, and where it comes from.

    `source` is given, counted (exact), sample, measured (of what this service has read lately), or planned (by the
    rates of `dist-attn plan`, as nothing was measured).
    """

    value: float
    low: float
    high: float
    source: Literal["given", "counted", "sample", "measured", "planned"]


class MemoryEstimate(Output):
    """Where a rank's memory goes, by the formulas of `dist-attn plan`. Units: bytes.

    `loading` is what is held while weights are read, before there is a state: `peak` is `process` and the larger of it
    and the other parts together.
    """

    process: int
    weights: int
    state: int
    activations: int
    exchange: int
    loading: int
    peak: int


class Estimate(Output):
    """What the work would take if it were sent now. Units: seconds, bytes.

    `seconds` is reading (and drawing) alone; `queue_seconds` what work that is under way adds; `total_seconds` both.
    `memory_bytes_per_rank` is null for models that have no formulas. `output_bytes` is by format.
    """

    object: Literal["estimate"] = "estimate"
    model: str
    ranks: int | None
    tokens: Range
    rows: int
    seconds: Range
    queue_seconds: float
    total_seconds: Range
    memory_bytes_per_rank: MemoryEstimate | None
    output_bytes: dict[str, int]
    notes: list[str]


# ---- jobs --------------------------------------------------------------------------------------


class JobRequest(Input):
    """Work that outlives its connection: the encoding of `input` or of a file, or a completion."""

    model: str | None = None
    input: str | None = Field(default=None, description="the text of an encoding")
    file_id: str | None = Field(default=None, description="a file in place of `input`")
    granularity: Literal["token", "window", "document"] | None = None
    window: int | None = Field(default=None, ge=1, le=MAX_WINDOW, description="tokens per row")
    pooling: Literal["mean", "last"] | None = None
    completion: dict[str, Any] | None = Field(
        default=None, description="the body of a request to /v1/completions, without stream"
    )


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EstimateOptions(_Query):
    """The same beside a body of text, which is the `input`."""

    model: str | None = None
    bytes: Annotated[int, Field(ge=0, le=MOST), BeforeValidator(digits)] | None = None
    granularity: Literal["token", "window", "document"] = "window"
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW), BeforeValidator(digits)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST), BeforeValidator(digits)] | None = None


class ListJobs(_Query):
    """Which page of jobs."""

    limit: Annotated[int, Field(ge=1, le=100), BeforeValidator(digits)] = 20
    after: Annotated[str, Field(max_length=100)] = ""


class EventOptions(_Query):
    """Which events: those behind number `after`."""

    after: Annotated[int, Field(ge=0, le=MOST), BeforeValidator(digits)] = 0


class ResultOptions(_Query):
    """How the rows of a job are sent, and from which on."""

    format: Literal["ndjson", "arrow", "npy"] | None = None
    from_row: Annotated[int, Field(ge=0, le=MOST), BeforeValidator(digits)] = 0


class JobProgress(Output):
    """How far a job is. `rows` are those that are safe; `expected_tokens` may be an estimate, null: not known yet."""

    tokens: int
    expected_tokens: int | None
    rows: int
    fraction: float
    tokens_per_second: float | None
    eta_seconds: float | None


class Job(Output):
    """A job. Times are unix times in seconds; at `expires_at` it is forgotten, with its results."""

    id: str
    object: Literal["job"] = "job"
    kind: Literal["encoding", "completion"]
    model: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    created_at: float
    started_at: float | None
    ended_at: float | None
    expires_at: float
    cancel_requested: bool
    attempts: int
    input_bytes: int
    progress: JobProgress
    error: dict[str, Any] | None
    last_event: int


class JobList(Output):
    """Jobs of a caller, in order of arrival."""

    object: Literal["list"] = "list"
    data: list[Job]
    has_more: bool
