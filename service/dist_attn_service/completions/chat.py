"""Chats as completions: the messages become the prompt that the model's template makes of them."""

from concurrent.futures import Executor

from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import utf8
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tasks import beside
from dist_attn_service.schemas.chat import ChatMessage, ChatRequest
from dist_attn_service.schemas.completions import CompletionRequest
from dist_attn_service.text.chat_template import ChatTemplate, TemplateRefusal
from dist_attn_service.text.tokenising import TokeniserPort, tokens_of

__all__ = ["ChatService"]

DEFAULT_MAX_TOKENS = 1024


class ChatService:
    """Turns chats into completions; without a template it refuses them."""

    def __init__(
        self, settings: Settings, tokeniser: TokeniserPort, template: ChatTemplate | None, threads: Executor
    ) -> None:
        self._settings = settings
        self._tokeniser = tokeniser
        self._template = template
        self._threads = threads

    @property
    def offered(self) -> bool:
        """Whether the model folder has a chat template."""
        return self._template is not None

    async def as_completion(self, request: ChatRequest) -> CompletionRequest:
        """The completion that answers the chat.

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
        prompt = await self._prompt(request.messages)
        return CompletionRequest(
            prompt=prompt,
            max_tokens=min(DEFAULT_MAX_TOKENS, self._settings.max_tokens) if asked is None else asked,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            **request.shared(),
        )

    async def _prompt(self, messages: list[ChatMessage]) -> list[int]:
        template = self._template
        if template is None:
            raise BadRequest(
                "this model has no chat template, so there is no way to tell it who said what; send the text to "
                "/v1/completions, or put a chat_template.jinja into the model folder",
                code=Code.NO_CHAT_TEMPLATE,
                param="messages",
            )
        plain = [_plain(message) for message in messages]
        try:
            parts = await beside(self._threads, template.render, plain)
        except TemplateRefusal as error:
            raise BadRequest(
                f"the model's chat template does not take these messages: {str(error)[:500]}", param="messages"
            ) from None
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            else:
                text = utf8(part, "the prompt", "messages")
                tokens += (await tokens_of(self._tokeniser, text, self._settings.piece_bytes)).tolist()
        if not tokens:
            raise BadRequest(
                "the model's chat template makes an empty prompt of these messages; send some text",
                code=Code.EMPTY_INPUT,
                param="messages",
            )
        return tokens


def _plain(message: ChatMessage) -> dict[str, str]:
    """A message as templates know it."""
    parts = message.content
    content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}
