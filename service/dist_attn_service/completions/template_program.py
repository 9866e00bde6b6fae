"""The process in which a model folder's chat template makes prompts, so that its memory and time are bounded.

    python -m dist_attn_service.completions.template_program

Each message on stdin and stdout is a JSON object after its length. The first one brings the template; the answer names
the values that it looks at. Each later one brings values for the template; the answer is the prompt, or a refusal.
"""

import json
import resource
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2 import Template, TemplateError, meta, nodes, pass_context, pass_eval_context
from jinja2.ext import Extension
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dist_attn.bounded_process import bound_here, limit
from dist_attn_service.completions.traced_text import SpecialTokens, TracedText, joined

__all__ = ["LENGTH_BYTES", "MEMORY_BYTES", "MOST_CHARACTERS", "MOST_SECONDS"]

LENGTH_BYTES = 8
MEMORY_BYTES = 1 << 29  # a chat of 8 MiB takes some 200 MB
MOST_SECONDS = 10  # of the processor's time for one message
MOST_WORDS = 500  # characters of a refusal
MOST_CHARACTERS = 1 << 24  # of a prompt; what is sent is bounded elsewhere, but a template may repeat it


class _Refusal(Exception):
    """The template does not take these messages; the text says why."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a trainer learns; where text is written it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the block itself."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Traced(NodeTransformer):
    """A change of templates after which each text of theirs is a TracedText, and `~` gives one."""

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Trace a text of an expression."""
        return nodes.Filter(node, "_owned", [], [], None, None) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Trace a text between expressions."""
        return nodes.Filter(nodes.Const(node.data), "_owned", [], [], None, None)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Trace the text that `~` joins."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Leave a constant in brackets as it is: it is a name, and never written."""
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self.visit(node.arg)
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that knows the template's own texts from those of messages."""

    concat = staticmethod(joined)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast(nodes.Template, _Traced().visit(super()._parse(source, name, filename)))


@pass_context  # so that it is not called while the template is compiled, which would write plain texts into it
def _owned(context: Any, text: str) -> TracedText:
    return TracedText.owned(text)


@pass_context
def _joined(context: Any, values: Iterable[Any]) -> TracedText:
    return joined(map(str, values))


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    text: str = do_join(context, value, str(d) + TracedText(), attribute)
    return text


def _make_environment() -> _Environment:
    """The environment that templates of Hugging Face rely on: no file, no import, no change of the values they get."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    del environment.globals["lipsum"]
    environment.filters |= {"_joined": _joined, "_owned": _owned, "join": _join, "safe": str, "tojson": _to_json}
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # not the library's own, which writes `<` as HTML would need it
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Templates:
    """The compiled templates of a folder by their names, and the special tokens that they may give."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], special: Mapping[str, int]) -> None:
        self._names = {name: TracedText.owned(text) for name, text in names.items()}
        self._special = SpecialTokens(special)
        self._templates: dict[str, Template] = {}
        self.asks_for: dict[str, list[str]] = {}
        environment = _make_environment()
        for name, text in sources.items():
            try:
                parsed = environment.parse(text)
                asks_for = sorted(meta.find_undeclared_variables(parsed))
                self._templates[name], self.asks_for[name] = environment.from_string(parsed), asks_for
            except Exception as error:  # Python's compiler may raise anything for a template that is nested too deep
                if name == "default":  # without the other one tools are refused
                    raise _Refusal(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None

    def prompt(self, name: str, told: dict[str, Any]) -> list[str | int]:
        """Make a prompt: texts, which never become special tokens, and the ids of those that stand in the template.

        Raises: _Refusal for a prompt that is too long, and in the template's own words.
        """
        for message in told["messages"]:
            message["role"] = TracedText.owned(message["role"])  # one of a few that the service takes
        pieces, size = [], 0
        for piece in self._templates[name].generate({"tools": None, "documents": None, **self._names, **told}):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise _Refusal(f"its prompt is over {MOST_CHARACTERS} characters")
        return self._special.cut(joined(pieces))


def _words(error: Exception) -> str:
    if isinstance(error, _Refusal | TemplateError) and str(error):
        return str(error)
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"
    todo = "send a text as the content of every message, or mend the template"
    return f"it fails on them ({type(error).__name__}); {todo}"


def _answer(templates: _Templates | None, message: bytes) -> tuple[_Templates | None, bytes]:
    """The templates, None where the process cannot go on, and the answer to a message."""
    try:
        told = json.loads(message)
        if templates is None:
            templates = _Templates(**told)
            answer: dict[str, Any] = {"asks_for": templates.asks_for}
        else:
            answer = {"parts": templates.prompt(**told)}
        return templates, json.dumps(answer, ensure_ascii=False).encode()
    except Exception as error:  # a template may fail in any way on messages that its author did not think of
        if isinstance(error, MemoryError):
            templates = None
        return templates, json.dumps({"refusal": _words(error)[:MOST_WORDS], "ends": templates is None}).encode()


def _limit_time() -> None:
    """Let the system end this process if the next message takes too long, even when the service is gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + MOST_SECONDS + 1)


def main() -> None:
    """Answer messages until there are none."""
    bound_here(MEMORY_BYTES)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    templates: _Templates | None = None
    while len(head := source.read(LENGTH_BYTES)) == LENGTH_BYTES:
        _limit_time()
        templates, answer = _answer(templates, source.read(int.from_bytes(head, "little")))
        sink.write(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        sink.flush()
        if templates is None:
            return


if __name__ == "__main__":
    main()
