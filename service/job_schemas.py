"""The JSON of estimates and jobs."""

from typing import Annotated, Literal

from pydantic import Field

from service.schemas import MAX_WINDOW, Input, Output

__all__ = ["Estimate", "EstimateRequest", "MemoryEstimate", "Range"]

MOST = 1 << 53


class EstimateRequest(Input):
    """Work that somebody thinks of: its size in one of four ways, and what is asked of it.

    `input` alone is the whole text; beside `bytes` it is a sample of a text of that size.
    """

    model: str | None = None
    input: str | None = Field(default=None, description="the text, or beside `bytes` a sample of it")
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
    """Where a rank's memory goes, by the formulas of `dist-attn plan`. Units: bytes."""

    process: int
    weights: int
    state: int
    activations: int
    exchange: int
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
