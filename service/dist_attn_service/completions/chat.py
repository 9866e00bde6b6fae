"""Chats as completions: the messages become the prompt that the model's template makes of them."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.completions.chat_template import ChatTemplate, TemplateRefusal
from dist_attn_service.completions.prepared import PreparedCompletion, prepare
from dist_attn_service.completions.tool_calls import CallReading, calls_grammar
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.schemas.completions import ChatMessage, ChatRequest, CompletionRequest

DEFAULT_MAX_TOKENS = 1024


class ChatService:
    """The part that turns chats into completions; without a template it refuses them."""

    def __init__(self, context: ServiceContext, template: ChatTemplate | None) -> None:
        self._context = context
        self._settings = context.settings
        self._template = template

    @classmethod
    @asynccontextmanager
    async def opened(cls, context: ServiceContext) -> AsyncIterator["ChatService"]:
        """Open the service with the template of the model's folder, whose processes end with the block.

        Raises: ModelFolderError for a template that cannot be read.
        """
        template = await ChatTemplate.started(context.settings.model, context.tokeniser.special_tokens)
        try:
            yield cls(context, template)
        finally:
            if template is not None:
                await template.close()

    @property
    def offered(self) -> bool:
        """Return whether the model folder has a chat template."""
        return self._template is not None

    async def prepare(self, request: ChatRequest, terms: RequestTerms, caller: str | None) -> PreparedCompletion:
        """The completion that answers the chat; without `stop` it ends where the model folder says that chats do.

        Raises: BadRequest when the model has no chat template, or it does not take these messages.
        """
        if request.top_logprobs is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        most = self._settings.max_logprobs
        if (request.top_logprobs or 0) > most:
            raise BadRequest(
                f"top_logprobs={request.top_logprobs} is over this service's limit of {most}", param="top_logprobs"
            )
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            raise BadRequest(
                "max_tokens and max_completion_tokens differ; send one of the two", param="max_completion_tokens"
            )
        asked, name = (
            (request.max_completion_tokens, "max_completion_tokens")
            if request.max_tokens is None
            else (request.max_tokens, "max_tokens")
        )
        most = self._settings.max_tokens
        if (asked or 0) > most:
            raise BadRequest(f"{name}={asked} is over this service's limit of {most}", param=name)
        prompt, lead = await self._prompt(request)
        completion = CompletionRequest(
            prompt=prompt,
            max_tokens=min(DEFAULT_MAX_TOKENS, self._settings.max_tokens) if asked is None else asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            **request.shared(),
        )
        prepared = await prepare(self._context, completion, terms, caller)
        form = None if self._template is None else self._template.call_form
        if request.tool_choice not in (None, "none", "auto"):
            if form is None:
                words = "the model's chat template writes no calls in a form that is known here; let it choose: auto"
                raise BadRequest(words, code=Code.UNSUPPORTED_PARAMETER, param="tool_choice")
            grammar = await self._context.beside(calls_grammar, request, form)
            prepared = replace(prepared, choices=tuple(choice.held_to(grammar) for choice in prepared.choices))
        reads = request.tools and request.tool_choice != "none"
        calls = CallReading.of(request, form) if form is not None and reads else None
        # An answer of a form ends where the form does: the folder's stop strings might stand within it.
        own = () if prepared.choices[0].sampling.grammar else self._context.model.stop_strings
        stops = own if request.stop is None else prepared.stops
        return replace(prepared, id=f"chatcmpl-{uuid.uuid4().hex}", stops=stops, lead=lead, calls=calls)

    async def _prompt(self, request: ChatRequest) -> tuple[list[int], str]:
        """The prompt's tokens, and the lead that an answer's text goes without: the blank after "Assistant:"."""
        template = self._template
        if template is None:
            raise BadRequest(
                "this model has no chat template, so there is no way to tell it who said what; send the text to "
                "/v1/completions, or put a chat_template.jinja into the model folder",
                code=Code.NO_CHAT_TEMPLATE,
                param="messages",
            )
        more = _told_besides(request, template)
        try:
            parts = await template.render([_plain(message) for message in request.messages], **more)
        except TemplateRefusal as error:
            raise BadRequest(
                f"the model's chat template does not take these messages: {error}", param="messages"
            ) from None
        tokens = await self._context.tokeniser.parts(parts)
        if not len(tokens):
            raise BadRequest(
                "the model's chat template makes an empty prompt of these messages; send some text",
                code=Code.EMPTY_INPUT,
                param="messages",
            )
        last = parts[-1]
        return list(map(int, tokens)), " " if isinstance(last, str) and not last[-1].isspace() else ""


def _told_besides(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """The values that the template gets beside the messages.

    Raises: BadRequest for tools or documents that it does not look at, or a value that has a field of its own.
    """
    more = dict(request.chat_template_kwargs or {})
    if reserved := sorted({"messages", "tools", "documents", "add_generation_prompt"} & more.keys()):
        raise BadRequest(
            f"chat_template_kwargs holds {reserved[0]!r}; it has a field of its own", param="chat_template_kwargs"
        )
    tells_tools = bool(request.tools) and request.tool_choice != "none"
    for name in ("tools", "documents"):
        value = getattr(request, name)
        if value and name not in template.asks_for(tools=tells_tools or name == "tools"):
            raise BadRequest(
                f"the model's chat template does not look at {name}, so the model would not hear of them; leave them "
                "out, or write them into a message",
                code=Code.UNSUPPORTED_PARAMETER,
                param=name,
            )
        if value and (tells_tools or name != "tools"):
            more[name] = value
    return more


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: one text, and the arguments of calls as objects."""
    parts = message.content
    content = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain | {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object, where they came as the JSON of one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}
