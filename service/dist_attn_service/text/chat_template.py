"""The chat template of a model folder: messages in, the model's prompt out, as Hugging Face's tokenisers write it."""

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

__all__ = ["ChatTemplate", "TemplateRefusal"]

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
        given = "".join(text for message in messages for text in message.values())
        mark = next((mark for mark in MARKS if mark not in given), None)
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
        return _any_of(self.special).sub(lambda found: "".join(mark + letter for letter in found[0]), text)

    def _cut(self, prompt: str, mark: str) -> list[str | int]:
        parts: list[str | int] = []
        at = 0
        for found in re.finditer(f"(?<!{mark})(?:{_any_of(self.added).pattern})", prompt) if self.added else ():
            parts += [prompt[at : found.start()].replace(mark, ""), self.added[found[0]]]
            at = found.end()
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
