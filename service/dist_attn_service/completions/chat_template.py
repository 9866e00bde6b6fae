"""The chat template of a model folder: messages in, the prompt out, in a sandbox and within bounds."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, TemplateError, meta, nodes, pass_context, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_join
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dist_attn.errors import ModelFolderError
from dist_attn.text.hugging_face import CONFIG_NAME, SPECIAL_NAME
from dist_attn.text.whole_text import content_of

__all__ = ["ChatTemplate", "TemplateRefusal"]

TEMPLATE_NAME = "chat_template.jinja"
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # no characters, and never will be: texts do not hold all of them
MOST_CHARACTERS = 1 << 26  # of a prompt; what is sent is bounded elsewhere, but a template may repeat it
MOST_MADE = 1 << 30  # of all values that are made on the way
MOST_INDENT = 16
MOST_BITS = 1 << 12  # of a number
MOST_SECONDS = 10.0  # for a prompt


class TemplateRefusal(Exception):
    """The template does not take these messages; the text says why."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a trainer learns; where text is written it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Budget:
    """What one prompt may still cost."""

    def __init__(self) -> None:
        self._until = time.monotonic() + MOST_SECONDS
        self._characters = MOST_MADE

    def spend(self, size: int = 0) -> None:
        """Count a value of so many characters that is about to be made.

        Raises: TemplateRefusal where it is too large, or all of them are, or the time is over.
        """
        self._characters -= size
        if size > MOST_CHARACTERS or self._characters < 0:
            raise TemplateRefusal(f"it makes a value of more than {MOST_CHARACTERS} characters, or too many large ones")
        if time.monotonic() > self._until:
            raise TemplateRefusal(f"it is not done in {MOST_SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("the budget of the prompt that is being written")


class _Counted(NodeTransformer):
    """Has loops and macros look at the clock, and `~` at the size of what it makes."""

    def _look(self, node: Any) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(nodes.Filter(nodes.Const(""), "_looked", [], [], None, None)))
        self.generic_visit(node)
        return cast(nodes.Node, node)

    visit_For = visit_Macro = visit_CallBlock = _look

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The texts of a `~`, put together by a function that counts them."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which time and the size of every text and list are bounded too."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Counted().visit(super()._parse(source, name, filename)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The sum, product, power or formatted text of two values.

        Raises: TemplateRefusal for one that is too large.
        """
        if max(_bits(left), _bits(right)) > MOST_BITS or (operator == "**" and _bits(left) * _count(right) > MOST_BITS):
            raise TemplateRefusal(f"it makes a number of more than {MOST_BITS} bits")
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise TemplateRefusal("it asks for a text of a given width")
        size = _length(left) * _count(right) + _length(right) * _count(left) if operator == "*" else 0
        _budget.get().spend(size or _length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        """What a function of the template gives; of methods of texts, no more than is bounded."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str | bytes):
            if function.__name__ in _UNBOUNDED:
                raise TemplateRefusal(f"it asks for {function.__name__} of a text, which is not offered")
            if function.__name__ == "replace" and len(args) > 1:
                _budget.get().spend(len(text) + text.count(args[0]) * len(args[1]))
            elif function.__name__ == "join" and args:
                args = (_counted(args[0], len(text)), *args[1:])
            else:
                _budget.get().spend(len(text))
        return super().call(context, function, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """`format` of a text, but for widths of many digits."""
        found = super().wrap_str_format(value)
        if found is not None and _WIDE_BRACES.search(value.__self__):
            return lambda *args, **named: _refuse("it asks for a text of a given width")
        return found


_UNBOUNDED = frozenset({"center", "encode", "expandtabs", "ljust", "rjust", "translate", "zfill"})
_NOT_OFFERED = ("batch", "center", "filesizeformat", "format", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r":[^{}]*(\d{4}|\{)")


def _length(value: Any) -> int:
    if isinstance(value, list | tuple):
        return 8 * len(value)  # bytes of a place
    return len(value) if isinstance(value, str) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _counted(values: Any, between: int = 0) -> list[Any]:
    """The values as a list, which is about to become a text with so many characters between them."""
    if isinstance(values, str):
        _budget.get().spend((8 + between) * len(values))
        return list(values)
    items = list(values)
    _budget.get().spend(sum(map(_length, items)) + (8 + between) * len(items))
    return items


@pass_context
def _looked(context: Any, value: str) -> str:
    _budget.get().spend()
    return value


@pass_context
def _joined(context: Any, values: list[Any]) -> str:
    texts = list(map(str, values))
    _budget.get().spend(sum(map(len, texts)))
    return "".join(texts)


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return str(do_join(context, _counted(value, len(d)), d, attribute))


@pass_eval_context
def _replace(context: Any, s: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    _budget.get().spend(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    _budget.get().spend(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, the texts that it may name (`bos_token`, …), and the ids of special tokens by their text.

    What a client sends never becomes a special token, whatever the template does with it: those stand in the template.
    """

    template: Template
    names: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, int] = field(default_factory=dict)
    asks_for: frozenset[str] = frozenset()
    """The values that it looks at."""
    tool_use: "ChatTemplate | None" = None
    """The one that takes its place where there are tools."""

    @classmethod
    def read(cls, folder: Path, special: Mapping[str, int]) -> "ChatTemplate | None":
        """The template of chat_template.jinja, else of tokenizer_config.json; None where there is neither.

        Raises: ModelFolderError for a template that is none.
        """
        about: dict[str, Any] = {}
        for name in (SPECIAL_NAME, CONFIG_NAME):
            about |= _read_json(folder / name) if (folder / name).is_file() else {}
        path = folder / TEMPLATE_NAME
        try:
            sources = {"default": path.read_text("utf-8")} if path.is_file() else _by_name(about.get("chat_template"))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from None
        if "default" not in sources:
            return None
        named = {name: content_of(value) for name, value in about.items() if name.endswith("_token")}
        if not about and len(special) == 1:  # a tokeniser of this project: its one special token ends a text
            named["eos_token"] = next(iter(special))
        names = {name: text for name, text in named.items() if text is not None}
        environment, made = _environment(), None
        for name in (name for name in ("tool_use", "default") if name in sources):
            try:
                asks_for = frozenset(meta.find_undeclared_variables(environment.parse(sources[name])))
                made = cls(environment.from_string(sources[name]), names, special, asks_for, made)
            except TemplateError as error:
                if name == "default":  # without the other one tools are refused
                    raise ModelFolderError(f"the chat template of {folder} cannot be read: {error}") from None
        return made

    def of(self, *, tools: bool) -> "ChatTemplate":
        """The template for a chat with or without tools."""
        return self.tool_use if tools and self.tool_use is not None else self

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[str | int]:
        """The prompt up to where the assistant begins to write: texts, and the ids of special tokens between them.

        `more` is what the template is told besides, such as `tools` and `documents`.

        Raises: TemplateRefusal where the template does not take these messages, or does not come to an end.
        """
        told = {"messages": list(messages), "add_generation_prompt": True, **more}
        texts = json.dumps(told, ensure_ascii=False)
        mark = next((mark for mark in MARKS if mark not in texts), None)
        if mark is None:
            raise TemplateRefusal(f"the messages hold all {len(MARKS)} noncharacters U+FDD0 to U+FDEF; leave one out")
        values = {"tools": None, "documents": None, **self.names, **self._guard(told, mark)}
        pieces, size, budget = [], 0, _Budget()
        token = _budget.set(budget)
        try:
            for piece in self.template.generate(**values):
                pieces.append(piece)
                size += len(piece)
                budget.spend()
                if size > MOST_CHARACTERS:
                    raise TemplateRefusal(f"its prompt is over {MOST_CHARACTERS} characters")
        except TemplateRefusal:
            raise
        except TemplateError as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from None
        except Exception as error:  # a template may fail in any way on messages that its author did not think of
            raise TemplateRefusal(
                f"it fails on them ({type(error).__name__}); send a text as the content of every message, or mend the "
                "template"
            ) from None
        finally:
            _budget.reset(token)
        return self._cut("".join(pieces), mark)

    def _guard(self, value: Any, mark: str) -> Any:
        """The value with marks in what would be a special token, in every text of it."""
        if isinstance(value, str) and self.special:
            return _any_of(self.special).sub(lambda match: "".join(mark + letter for letter in match[0]), value)
        if isinstance(value, dict):
            return {name: self._guard(inner, mark) for name, inner in value.items()}
        return [self._guard(inner, mark) for inner in value] if isinstance(value, list) else value

    def _cut(self, prompt: str, mark: str) -> list[str | int]:
        parts: list[str | int] = []
        at = 0
        for match in re.finditer(f"(?<!{mark})(?:{_any_of(self.special).pattern})", prompt) if self.special else ():
            parts += [prompt[at : match.start()].replace(mark, ""), self.special[match[0]]]
            at = match.end()
        parts.append(prompt[at:].replace(mark, ""))
        return [part for part in parts if part != ""]


def _environment() -> _Environment:
    """What templates of Hugging Face rely on and nothing else: no file, no import, no change of what they get."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    for name in _NOT_OFFERED:
        del environment.filters[name]
    del environment.globals["lipsum"]
    counted = {"_joined": _joined, "_looked": _looked, "indent": _indent, "join": _join, "replace": _replace}
    counted["list"] = pass_eval_context(lambda context, value: _counted(value))
    environment.filters |= counted | {"tojson": _to_json}
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # not the library's own, which writes `<` as HTML would need it
    if _count(indent) > MOST_INDENT:
        raise TemplateRefusal(f"it indents by {indent}; at most {MOST_INDENT} is offered")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _any_of(texts: Mapping[str, int]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _by_name(value: Any) -> dict[str, str]:
    """Templates by their names; one without a name is called `default`."""
    if isinstance(value, list):
        return {one["name"]: one["template"] for one in value if {"name", "template"} <= one.keys()}
    return {"default": value} if isinstance(value, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}
