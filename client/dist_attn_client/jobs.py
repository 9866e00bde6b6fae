"""Jobs of a service: work that goes on without its client, followed and fetched when that suits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, final

import msgspec

from dist_attn_api.types import Completion, EncodingSummary, Job, JobList
from dist_attn_client.encodings import EncodingProgress, Row, RowOptions, RowsPlan, row_query, what_to_encode
from dist_attn_client.errors import NotOurAnswer, error_of_words
from dist_attn_client.exchange import Exchange
from dist_attn_client.plan import Call, Event, EventDecoder, Finished, OnSent, Plan, path_of, told
from dist_attn_client.sources import Document
from dist_attn_client.streams import AsyncStream
from dist_attn_client.texts import Sampling, drawing_body

LAST_EVENTS = {"succeeded", "failed", "cancelled"}


@dataclass(frozen=True)
class JobEvent:
    """An event of a job; `data` has its members beside its type and time."""

    number: int
    type: str
    at: float
    data: dict[str, Any]


@final
class AsyncJobs:
    """`/v1/jobs` of one service."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def encode(
        self,
        document: Document | None = None,
        *,
        file_id: str | None = None,
        boundaries: Sequence[int] | None = None,
        deadline_s: float | None = None,
        on_sent: OnSent | None = None,
        **options: Unpack[RowOptions],
    ) -> Job:
        """Hand in the encoding of a document, or of a file of the service; once this returns, the job runs by itself.

        `boundaries` are rising byte offsets at which rows end, of a `str` or a file of the service.

        A connection that is lost meanwhile is an error: whether there is a job then is not known, `all` tells. Where
        that is likely, upload the document first, which goes on after a break, and hand in its `file_id`.

        Raises: InputError, ClientError.
        """
        (source, body), query = what_to_encode(document, file_id, boundaries), row_query(options)
        try:
            if body is None:
                call = Call("POST", "/v1/jobs", query, source=source, on_sent=on_sent)
                return await self._exchange.value(call, Job, deadline_s)
            return await self._exchange.value(Call("POST", "/v1/jobs", json=body | told(query)), Job, deadline_s)
        finally:
            if source is not None:
                source.close()

    async def complete(self, prompt: str | list[int], **options: Unpack[Sampling]) -> Job:
        """Hand in a completion. Raises: ClientError."""
        body = {"completion": drawing_body(options, prompt=prompt)}
        return await self._exchange.value(Call("POST", "/v1/jobs", json=body), Job)

    async def all(self) -> list[Job]:
        """All jobs of this key, in order of arrival. Raises: ClientError."""
        return await self._exchange.all("/v1/jobs", JobList)

    async def get(self, job: str) -> Job:
        """Get the status and progress of a job. Raises: Missing, ClientError."""
        return await self._exchange.get(_path(job), Job)

    def events(self, job: str, *, after: int = 0, deadline_s: float | None = None) -> AsyncStream[JobEvent, JobEvent]:
        """Stream the events of a job after number `after`, until it has ended; `end` is the last event.

        Raises: Missing, ClientError.
        """
        return self._exchange.stream(_EventsPlan(job, after), deadline_s)

    async def wait(self, job: str, *, deadline_s: float | None = None) -> Job:
        """The job once it has ended, well or not. Raises: OutOfTime, Missing, ClientError."""
        await self.events(job, deadline_s=deadline_s).rest()
        return await self.get(job)

    def rows(
        self,
        job: str,
        *,
        from_row: int = 0,
        deadline_s: float | None = None,
        on_progress: Callable[[EncodingProgress], None] | None = None,
    ) -> AsyncStream[Row, EncodingSummary]:
        """The rows of an encoding, while it runs as they come. Raises: Refused when it failed, ClientError."""

        def call(row: int) -> Call:
            return Call("GET", _path(job, "result"), {"format": "ndjson", "from_row": row or None}, repeatable=True)

        plan = RowsPlan(call, from_row=from_row, on_progress=on_progress)
        return self._exchange.stream(plan, deadline_s)

    async def completion(self, job: str) -> Completion:
        """Get the result of a completion. Raises: Conflict before it is done or when it failed, ClientError."""
        return await self._exchange.get(_path(job, "result"), Completion)

    async def cancel(self, job: str) -> Job:
        """Stop a job; rows that are there stay. Raises: Missing, ClientError."""
        return await self._exchange.value(Call("POST", _path(job, "cancel"), repeatable=True), Job)

    async def delete(self, job: str) -> None:
        """Stop a job and forget it with all that it has. Raises: Missing, ClientError."""
        await self._exchange.delete(_path(job))


@final
class _EventsPlan(Plan[JobEvent, JobEvent]):
    """The events of a job after a number, each once, to the one that ends it."""

    decoder = EventDecoder

    def __init__(self, job: str, after: int) -> None:
        self._job, self._after = job, after

    def call(self) -> Call:
        """The request for the events that had not come before."""
        return Call("GET", _path(self._job, "events"), {"after": self._after}, repeatable=True)

    def take(self, part: bytes | Event) -> Iterator[JobEvent | Finished[JobEvent]]:
        """An event. Raises: Refused for an error that ends the stream."""
        assert isinstance(part, Event)
        try:
            data = msgspec.json.decode(part.data, type=dict)
        except msgspec.DecodeError as error:
            raise NotOurAnswer(f"{self.call().what}: an event cannot be read: {error}") from None
        if part.type == "error":
            raise error_of_words(data, what=self.call().what)
        if part.number <= self._after:
            return
        self._after = part.number
        event = JobEvent(part.number, part.type, float(data.pop("at", 0.0)), data)
        event.data.pop("type", None)
        yield event
        if part.type in LAST_EVENTS:
            yield Finished(event)


def _path(job: str, *more: str) -> str:
    return path_of("v1", "jobs", job, *more)
