"""How completions and chats are answered, whole or as an event stream; what a route writes differs in form only."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from dist_attn_service.base.errors import ClientGone, ServiceError
from dist_attn_service.base.logs import RequestRecord
from dist_attn_service.completions.prepared import PreparedCompletion
from dist_attn_service.completions.run import Delta
from dist_attn_service.completions.whole import Gathered, gather
from dist_attn_service.dependencies import Services
from dist_attn_service.http.exchange import EventWriter, RequestBody, ResponseWriter, StreamedResponse, while_connected
from dist_attn_service.schemas.completions import CompletionUsage, PromptProgress
from dist_attn_service.schemas.drawing import StreamOptions

__all__ = ["AnswerForm", "answer"]


class AnswerForm(ABC):
    """The JSON of one route: its events, and its whole answer."""

    def __init__(self, prepared: PreparedCompletion, model: str) -> None:
        self.prepared = prepared
        self.head: dict[str, Any] = {"id": prepared.id, "created": prepared.created, "model": model}

    def opening(self, usage: CompletionUsage | None) -> Iterable[BaseModel]:
        """The events before any text; these and the next two tell the usage so far where it is given."""
        return ()

    @abstractmethod
    def text(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        """The event of more text of a choice."""

    @abstractmethod
    def end(self, delta: Delta, usage: CompletionUsage | None) -> BaseModel:
        """The event of a choice's end."""

    @abstractmethod
    def progress(self, progress: PromptProgress) -> BaseModel:
        """The event of how far the prompts are read."""

    @abstractmethod
    def usage(self, usage: CompletionUsage) -> BaseModel:
        """The last event."""

    @abstractmethod
    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> BaseModel:
        """The answer in one."""


async def answer(
    services: Services,
    form: AnswerForm,
    body: RequestBody,
    record: RequestRecord,
    *,
    stream: bool | None,
    options: StreamOptions | None,
) -> Response:
    """The answer to a checked request.

    Raises: ServiceError as long as nothing has been sent; afterwards it is the last event.
    """
    prepared = form.prepared
    record.note(
        completion_id=prepared.id,
        prompt_tokens=prepared.prompt_tokens,
        choices=len(prepared.choices),
        stream=bool(stream),
    )
    if not stream:
        return await _whole(services, form, body, record)
    told = options or StreamOptions()

    async def exchange(writer: ResponseWriter) -> None:
        with services.open_requests.one(record.holder):
            await while_connected(body, _stream(services, form, told, writer, record))

    return StreamedResponse(
        exchange,
        body,
        record,
        last_words=ServiceError.events,
        stall_seconds=services.settings.client_stall_seconds,
    )


async def _whole(services: Services, form: AnswerForm, body: RequestBody, record: RequestRecord) -> Response:
    def counted(usage: CompletionUsage) -> None:
        services.count_completion(record, usage)

    work = gather(services.completions, form.prepared, record.request_id, counted=counted)
    try:
        with services.open_requests.one(record.holder):
            choices, usage = await while_connected(body, work)
    except ClientGone:
        record.reason = "client_gone"
        return Response(status_code=499)
    finally:
        work.close()  # where it was not begun
    return Response(form.whole(choices, usage).model_dump_json(), media_type="application/json")


async def _stream(
    services: Services, form: AnswerForm, options: StreamOptions, writer: ResponseWriter, record: RequestRecord
) -> None:
    events = EventWriter(writer, ping_seconds=services.settings.ping_seconds)
    async with services.completions.open(form.prepared, record.request_id) as run:

        def so_far() -> CompletionUsage | None:
            return run.usage if options.continuous_usage_stats else None

        try:
            await events.start()
            for event in form.opening(so_far()):
                await events.send(event)
            while not run.finished:
                delta = await events.alive(run.next())
                if delta.processed is not None:
                    await events.send(form.progress(run.progress))
                if delta.text or delta.scored:
                    await events.send(form.text(delta, so_far()))
                if delta.finish_reason is not None:
                    await events.send(form.end(delta, so_far()))
            if options.include_usage:
                await events.send(form.usage(run.usage))
        finally:
            services.count_completion(record, run.usage)
    await events.done()
