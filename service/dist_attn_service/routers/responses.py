"""OpenAI's /v1/responses for texts and calls of functions: a chat as items and their events."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, final

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from dist_attn_api.types import CompletionUsage
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.base.parsing import parse_json
from dist_attn_service.completions.prepared import PreparedCompletion
from dist_attn_service.completions.run import Delta, Gathered
from dist_attn_service.dependencies import ModelServices
from dist_attn_service.routers.completions import CallingForm, send_answer
from dist_attn_service.routers.incoming import Asked
from dist_attn_service.routers.openapi import described, events
from dist_attn_service.schemas.completions import ChatRequest, ToolCall
from dist_attn_service.schemas.responses import ResponseRequest

router = APIRouter()
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Parameters of chats by those of responses that they are made of."""
MOST_BLANKS = 64
"""Characters that are held back before a message, as a call may follow them."""
Event = dict[str, Any]


@router.post(
    "/v1/responses",
    tags=["chat"],
    response_model=dict[str, Any],
    summary="Answer a chat, as OpenAI's responses do",
    openapi_extra=described(
        ResponseRequest, answers=events("The whole response; with `stream`, its items as server-sent events.")
    ),
)
async def create_response(asked: Asked) -> Response:
    """Answer like /v1/chat/completions, in another shape. Nothing is kept: each request has the whole conversation."""
    wanted = await asked.json(ResponseRequest)
    served = asked.services.context_for(wanted.model, "completions")
    try:
        chat = parse_json(msgspec.json.encode(wanted.chat()), ChatRequest)
        prepared = await served.chat.prepare(chat, asked.terms(wanted), asked.caller)
    except BadRequest as error:
        param = NAMES.get((error.param or "").partition(".")[0], error.param)
        raise BadRequest(error.message, code=error.code, param=param, headers=error.headers) from None
    return await send_answer(asked, _ResponseForm(prepared, served, wanted.echoed()), chat)


@final
class _ResponseForm(CallingForm):
    """The items of one answer, which is streamed; a whole answer is what the last event holds."""

    def __init__(self, prepared: PreparedCompletion, served: ModelServices, echoed: Mapping[str, Any]) -> None:
        super().__init__(prepared, served)
        self._echoed = echoed
        self._id = uuid.uuid4().hex
        self._items: list[Event] = []
        self._pieces: list[str] | None = None  # of the text of a message that is open: the last item
        self._blanks = ""
        self._cut = False  # by the limit on tokens
        self._sent = 0

    def event(self, choices: Any = (), **_: Any) -> Event:
        """An event with its number."""
        (event,) = choices
        self._sent += 1
        return {**event, "sequence_number": self._sent - 1}

    def openings(self) -> Iterable[Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def pieces(self, delta: Delta) -> Iterable[Event]:
        text, calls, reason = self._taken_apart(delta.index, delta.text, delta.finish_reason)
        if self._pieces is None:
            text, self._blanks = self._blanks + text, ""
            if not text.strip() and len(text) < MOST_BLANKS:
                text, self._blanks = "", text
        if text:
            yield from self._more(text)
        for call in calls:
            self._blanks = ""
            yield from self._message_ends()
            yield from self._call(call)
        self._cut |= reason == "length"

    def closings(self, usage: CompletionUsage) -> Iterable[Event]:
        if not self._items:
            yield from self._more(self._blanks)
        yield from self._message_ends()
        status = "incomplete" if self._cut else "completed"
        yield {"type": f"response.{status}", "response": self._response(status, usage)}

    def whole(self, choices: list[Gathered], usage: CompletionUsage) -> Event:
        (choice,) = choices
        *_, last = (*self.pieces(Delta(0, choice.text, (), choice.finish_reason)), *self.closings(usage))
        response: Event = last["response"]
        return response

    def _more(self, text: str) -> Iterable[Event]:
        """More text of the open message, or of a new one."""
        if self._pieces is None:
            self._pieces = []
            self._items.append(self._message("in_progress", []))
            yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": self._items[-1]}
            yield self._in_message("content_part.added", part=_part(""))
        self._pieces.append(text)
        yield self._in_message("output_text.delta", delta=text, logprobs=[])

    def _message_ends(self) -> Iterable[Event]:
        if self._pieces is None:
            return
        text, self._pieces = "".join(self._pieces), None
        yield self._in_message("output_text.done", text=text, logprobs=[])
        yield self._in_message("content_part.done", part=_part(text))
        self._items[-1] = self._message("incomplete" if self._cut else "completed", [_part(text)])
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": self._items[-1]}

    def _message(self, status: str, content: list[Event]) -> Event:
        name = f"msg_{self._id}_{len(self._items)}" if status == "in_progress" else self._items[-1]["id"]
        return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}

    def _in_message(self, kind: str, **more: Any) -> Event:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return {"type": f"response.{kind}", **place, **more}

    def _call(self, call: ToolCall) -> Iterable[Event]:
        fields = {"call_id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        done = {"id": f"fc_{call.id}", "type": "function_call", "status": "completed", **fields}
        place = {"output_index": len(self._items)}
        self._items.append(done)
        begun = {**done, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", **place, "item": begun}
        for kind, name in (("delta", "delta"), ("done", "arguments")):
            what = {"item_id": done["id"], "name": fields["name"], name: fields["arguments"]}
            yield {"type": f"response.function_call_arguments.{kind}", **place, **what}
        yield {"type": "response.output_item.done", **place, "item": done}

    def _response(self, status: str, usage: CompletionUsage | None = None) -> Event:
        used = usage and {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": usage.prompt_tokens_details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": self.prepared.created, "status": status}
        fields = {"error": None, "incomplete_details": why, "model": self.model, "output": list(self._items)}
        return {**head, **fields, "usage": used, "previous_response_id": None, "store": False, **self._echoed}


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
