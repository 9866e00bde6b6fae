"""Chats as completions: the messages become the prompt that the model's template makes of them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dist_attn.errors import ModelFolderError
from dist_attn_service.base.errors import BadRequest, Code
from dist_attn_service.base.parsing import utf8
from dist_attn_service.engine.run import ServiceContext
from dist_attn_service.schemas.completions import ChatMessage, ChatRequest, CompletionRequest
from dist_attn_service.text.tokenising import tokens_of

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # no characters, and never will be: texts do not hold all of them


class TemplateRefusal(Exception):
    """The template does not take these messages; the text says why."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a trainer learns; where text is written it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, the texts that it may name (`bos_token`, …), and the ids of added tokens by their text.

    What a client sends never becomes a special token, whatever the template does with it: those stand in the template.
    """

    template: Template
    names: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> "ChatTemplate | None":
        """The template of chat_template.jinja, else of tokenizer_config.json; None where there is neither.

        Raises: ModelFolderError for a template that is none.
        """
        about = _read_json(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
        path = folder / TEMPLATE_NAME
        source = path.read_text("utf-8") if path.is_file() else _default(about.get("chat_template"))
        if source is None:
            return None
        tokens = _read_json(folder / "tokenizer.json").get("added_tokens") or []
        named = {name: _content(value) for name, value in about.items() if name.endswith("_token")}
        if not about and len(tokens) == 1:  # a tokeniser of this project: its one added token ends a text
            named["eos_token"] = tokens[0]["content"]
        try:
            template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelFolderError(f"the chat template of {folder} cannot be read: {error}") from None
        return cls(
            template,
            {name: text for name, text in named.items() if text is not None},
            {token["content"]: int(token["id"]) for token in tokens if token["content"]},
            frozenset(token["content"] for token in tokens if token["special"]),
        )

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[str | int]:
        """The prompt up to where the assistant begins to write: texts, and the ids of added tokens between them.

        Raises: TemplateRefusal where the template does not take these messages.
        """
        texts = "".join(text for message in messages for text in message.values())
        mark = next((mark for mark in MARKS if mark not in texts), None)
        if mark is None:
            raise TemplateRefusal(f"the messages hold all of the noncharacters U+FDD0 to U+FDEF: {len(MARKS)}")
        guarded = [{name: self._guard(text, mark) for name, text in message.items()} for message in messages]
        try:
            prompt = self.template.render(messages=guarded, add_generation_prompt=True, **self.names)
        except Exception as error:  # a template may fail in any way on messages that its author did not think of
            raise TemplateRefusal(str(error) or type(error).__name__) from None
        return self._cut(prompt, mark)

    def _guard(self, text: str, mark: str) -> str:
        """The text with marks in what would be a special token."""
        if not self.special:
            return text
        return _any_of(self.special).sub(lambda match: "".join(mark + letter for letter in match[0]), text)

    def _cut(self, prompt: str, mark: str) -> list[str | int]:
        parts: list[str | int] = []
        at = 0
        for match in re.finditer(f"(?<!{mark})(?:{_any_of(self.added).pattern})", prompt) if self.added else ():
            parts += [prompt[at : match.start()].replace(mark, ""), self.added[match[0]]]
            at = match.end()
        parts.append(prompt[at:].replace(mark, ""))
        return [part for part in parts if part != ""]


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face rely on and nothing else: no file, no import, no change of what they get."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # not the library's own, which writes `<` as HTML would need it
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _any_of(texts: Mapping[str, int] | frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _default(value: Any) -> str | None:
    """The template; of several by name the one called `default`."""
    if isinstance(value, list):
        return next((one["template"] for one in value if one.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


DEFAULT_MAX_TOKENS = 1024


class ChatService:
    """Turns chats into completions; without a template it refuses them."""

    def __init__(self, context: ServiceContext, template: ChatTemplate | None) -> None:
        self._context = context
        self._settings = context.settings
        self._template = template

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
            parts = await self._context.beside(template.render, plain)
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
                tokens += (await tokens_of(self._context.tokeniser, text, self._settings.piece_bytes)).tolist()
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
