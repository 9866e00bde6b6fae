"""What happens to a job, and to a text that is appended: streams that are asked again from where they were."""

from collections.abc import Iterator
from typing import final

import msgspec

from dist_attn_client.errors import NotOurAnswer, error_of_words
from dist_attn_client.job_objects import JobEvent
from dist_attn_client.lines import Decoder, Event, EventDecoder, LineDecoder
from dist_attn_client.plan import Call, Finished, Plan, path_of
from dist_attn_client.session_objects import AppendProgress, AppendSummary

__all__ = ["AppendPlan", "EventsPlan"]

LAST_EVENTS = {"succeeded", "failed", "cancelled"}


@final
class EventsPlan(Plan[JobEvent, JobEvent]):
    """The events of a job behind a number, each once, to the one that ends it."""

    def __init__(self, job: str, after: int) -> None:
        self._job, self._after = job, after

    def call(self) -> Call:
        """The events that were not there yet."""
        return Call("GET", path_of("v1", "jobs", self._job, "events"), {"after": self._after}, repeatable=True)

    def decoder(self) -> Decoder:
        """Events."""
        return EventDecoder()

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


@final
class AppendPlan(Plan[AppendProgress, AppendSummary]):
    """An append under a key: sent again whole, each part of it is in the session once.

    Progress that was told before is passed over then, and does not count as any.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._position = self._kept = -1  # the furthest that was told

    def call(self) -> Call:
        """The same request with the same key."""
        return self._call

    def decoder(self) -> Decoder:
        """Lines."""
        return LineDecoder()

    def take(self, part: bytes | Event) -> Iterator[AppendProgress | Finished[AppendSummary]]:
        """How far it is; at the end the summary. Raises: Refused for an error line."""
        assert isinstance(part, bytes)
        try:
            line = msgspec.json.decode(part, type=dict)
            match line.get("object"):
                case "session.append.progress":
                    progress = msgspec.json.decode(part, type=AppendProgress)
                    if progress.position > self._position or progress.kept > self._kept:
                        self._position = max(self._position, progress.position)
                        self._kept = max(self._kept, progress.kept)
                        yield progress
                case "session.append":
                    yield Finished(msgspec.json.decode(part, type=AppendSummary))
                case "error":
                    raise error_of_words(line, what=self._call.what)
        except msgspec.DecodeError as error:
            raise NotOurAnswer(f"{self._call.what}: a line cannot be read: {error}") from None
