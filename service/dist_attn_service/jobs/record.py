"""What is known of one job: a value that changes as a whole, and stands in the catalogue as JSON."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from dist_attn.store.ledger import Record, changed, moment
from dist_attn.wire.messages import RowSpec
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.encodings.encoding_run import RunPoint

State = Literal["receiving", "queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
KEPT_EVENTS = 64


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a job; `number` grows by at least 1. `at` is a unix time in seconds."""

    number: int
    type: str
    at: float
    data: dict[str, Any]


class JobPoint(msgspec.Struct, frozen=True):
    """Where an encoding goes on: a place of its document, and the id of the state there."""

    run: RunPoint
    snapshot: str


class JobRecord(Record, frozen=True, kw_only=True):
    """One job. Times are unix times in seconds; `expected_tokens` may be an estimate, `rows` are those safe on disk.

    `spec` is of an encoding, `completion` the options of a completion as they were sent, with its seed. The process
    that works on it is the `runner`, which is taken for dead after `lease_until`. `point` is where it goes on then.
    `input_sha256` is in hex, of all `input_bytes` of an encoding; empty in records of an earlier version.
    """

    KIND: ClassVar[str] = "job"
    caller: str
    kind: Literal["encoding", "completion"]
    model: str
    created_at: float
    expires_at: float
    state: State
    spec: RowSpec | None = None
    completion: dict[str, Any] | None = None
    input_bytes: int = 0
    input_sha256: str = ""
    disk_bytes: int = 0
    expected_tokens: float | None = None
    tokens: int = 0
    rows: int = 0
    tokens_per_second: float | None = None
    attempts: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    error: dict[str, Any] | None = None
    runner: str = ""
    lease_until: float = 0.0
    retry_at: float = 0.0
    cancel: bool = False
    deleted: bool = False
    point: JobPoint | None = None
    events: tuple[Event, ...] = ()

    def index(self, name: str) -> tuple[str, ...]:
        """Those of a caller, those that expire, those that have not ended."""
        is_open = not self.ended or self.deleted
        keys = (self.caller_key(name), f"expiry/{moment(self.expires_at)}/{name}", self.open_key(name))
        return keys if is_open else keys[:-1]

    def sums(self) -> Mapping[str, int]:
        """One of its caller's, and its bytes."""
        return {f"usage/{self.caller}": 1, "usage": self.disk_bytes}

    def caller_key(self, name: str) -> str:
        """Its place among those of its caller."""
        return f"caller/{self.caller}/{moment(self.created_at)}/{name}"

    def open_key(self, name: str) -> str:
        """Its place among those that have not ended."""
        return f"open/{moment(self.created_at)}/{name}"

    @property
    def life_s(self) -> float:
        """How long it is kept from its beginning on, or from its end."""
        return self.expires_at - (self.ended_at or self.created_at)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED

    def check_model(self, served: str) -> None:
        """Raises: BadRequest when the job was handed in for another model than the one that is served now."""
        if self.model != served:
            raise BadRequest(
                f"this job was handed in for the model {self.model}; served is {served} now: send it again",
                param="model",
            )

    @property
    def last_event(self) -> int:
        """The number of the newest event."""
        return self.events[-1].number if self.events else 0


def with_event(record: JobRecord, kind: str, at: float, **data: Any) -> JobRecord:
    """The record with one more event. Of events of progress in a row only the newest is kept."""
    event = Event(record.last_event + 1, kind, at, data)
    before = record.events
    if kind == "progress" and before and before[-1].type == "progress":
        before = before[:-1]
    return changed(record, events=(*before, event)[-KEPT_EVENTS:])


def end_of(record: JobRecord, state: State, at: float, keep_seconds: float, **more: Any) -> JobRecord:
    """The record of a job that has ended, with the event that says so; it is kept for so long."""
    ended = changed(
        record,
        state=state,
        ended_at=at,
        expires_at=at + keep_seconds,
        runner="",
        lease_until=0.0,
        cancel=False,
        **more,
    )
    data = {"tokens": ended.tokens, "rows": ended.rows} | ({} if ended.error is None else {"error": ended.error})
    return with_event(ended, state, at, **data)
