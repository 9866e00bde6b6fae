"""Jobs of a service: work that goes on without its client, followed and fetched when that suits."""

from collections.abc import Callable
from typing import Unpack, final

from dist_attn_client.encodings import EncodingProgress, Granularity, Pooling, Row, RowsPlan, row_query
from dist_attn_client.exchange import Exchange
from dist_attn_client.follow import EventsPlan
from dist_attn_client.job_objects import Job, JobEvent, JobPage
from dist_attn_client.objects import Completion, EncodingSummary
from dist_attn_client.plan import Call, Reached, path_of
from dist_attn_client.sessions import delete
from dist_attn_client.sources import Document, one_document
from dist_attn_client.streams import AsyncStream
from dist_attn_client.texts import Sampling, drawing_body

__all__ = ["AsyncJobs"]

PAGE = 100


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
        granularity: Granularity | None = None,
        window: int | None = None,
        pooling: Pooling | None = None,
        model: str | None = None,
        deadline_s: float | None = None,
        on_sent: Callable[[Reached], None] | None = None,
    ) -> Job:
        """Hand in the encoding of a document, or of a file of the service; once this returns, the job needs nobody.

        A connection that is lost meanwhile is an error: whether there is a job then is not known, `all` tells. Where
        that is likely, upload the document first, which goes on after a break, and hand in its `file_id`.

        Raises: InputError, ClientError.
        """
        source = one_document(document, file_id)
        options = row_query(granularity, window, pooling, model)
        if source is None:
            body = {name: value for name, value in {**options, "file_id": file_id}.items() if value is not None}
            return await self._exchange.value(Call("POST", "/v1/jobs", json=body), Job, deadline_s)
        try:
            call = Call("POST", "/v1/jobs", options, source=source)
            return await self._exchange.value(call, Job, deadline_s, on_sent)
        finally:
            source.close()

    async def complete(self, prompt: str | list[int], **options: Unpack[Sampling]) -> Job:
        """Hand in a completion. Raises: ClientError."""
        body = {"completion": drawing_body(options, prompt=prompt)}
        return await self._exchange.value(Call("POST", "/v1/jobs", json=body), Job)

    async def all(self) -> list[Job]:
        """All jobs of this key, in order of arrival. Raises: ClientError."""
        found: list[Job] = []
        more = True
        while more:
            query = {"limit": PAGE, "after": found[-1].id if found else None}
            page = await self._exchange.value(Call("GET", "/v1/jobs", query, repeatable=True), JobPage)
            found += page.data
            more = page.has_more and bool(page.data)
        return found

    async def get(self, job: str) -> Job:
        """How a job stands. Raises: Missing, ClientError."""
        return await self._exchange.value(Call("GET", _path(job), repeatable=True), Job)

    def events(self, job: str, *, after: int = 0, deadline_s: float | None = None) -> AsyncStream[JobEvent, JobEvent]:
        """What happens to a job behind event number `after`, until it has ended; `end` is the last event.

        Raises: Missing, ClientError.
        """
        return self._exchange.stream(EventsPlan(job, after), deadline_s)

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
        """What a completion came to. Raises: Conflict before it is done or when it failed, ClientError."""
        return await self._exchange.value(Call("GET", _path(job, "result"), repeatable=True), Completion)

    async def cancel(self, job: str) -> Job:
        """Stop a job; rows that are there stay. Raises: Missing, ClientError."""
        return await self._exchange.value(Call("POST", _path(job, "cancel"), repeatable=True), Job)

    async def delete(self, job: str) -> None:
        """Stop a job and forget it with all that it has. Raises: Missing, ClientError."""
        await delete(self._exchange, _path(job))


def _path(job: str, *more: str) -> str:
    return path_of("v1", "jobs", job, *more)
