"""Calls of tools in an answer, as models are told to write them: JSON between two marks, or as the whole answer."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import msgspec

from dist_attn.errors import GrammarError
from dist_attn.text.grammars import drawn_schema
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.completions.bounded_grammar import bounded_grammar
from dist_attn_service.schemas.completions import ChatRequest, ToolCall, ToolFunction
from dist_attn_service.text.choice_text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"
MOST_CHARACTERS = 1 << 20  # of a call; a longer one is text
MOST_ENDS = 16  # in strings of one call
MOST_CALLS = 32  # of an answer that must call: a model that is unsure would write more without end
_IN_STRING = re.compile(r'(?:[^"]++|"(?:[^"\\\x00-\x1f]|\\.)*+")*+"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*+\Z')
"""A text of JSON that ends within a string. It goes through the text once."""


@dataclass(frozen=True)
class CallForm:
    """The form of calls: what stands around and between several of them, around each, and the name of its arguments.

    `mark` is what an answer of calls alone may begin with where it is no special token, which has no text.
    """

    around: tuple[str, str] = ("", "")
    between: str | None = None
    each: tuple[str, str] = ("", "")
    arguments: str = "arguments"
    mark: str = ""


HERMES = CallForm(between="\n", each=(f"{BEGIN}\n", f"\n{END}"))  # and Qwen's
MISTRAL = CallForm(around=("[", "]"), between=", ", mark="[TOOL_CALLS]")
LLAMA = CallForm(arguments="parameters", mark="<|python_tag|>")
_TOLD = ((b"<tool_call>", HERMES), (b"[TOOL_CALLS]", MISTRAL), (b"<|python_tag|>", LLAMA), (b'"parameters\\": ', LLAMA))


def form_told_by(source: bytes) -> CallForm | None:
    """The form in which a template, in JSON, has calls written; None for one that is not known here."""
    return next((form for words, form in _TOLD if words in source), None)


@dataclass(frozen=True)
class CallReading:
    """The calls that are looked for: of these functions where there are no marks, and `alone` the first only."""

    form: CallForm
    functions: frozenset[str]
    alone: bool

    @classmethod
    def of(cls, request: ChatRequest, form: CallForm) -> "CallReading":
        """The calls that a request asks for."""
        names = [_name(tool.get("function")) for tool in request.tools or ()]
        return cls(form, frozenset(filter(None, names)), request.parallel_tool_calls is False)

    def scanner(self, name: str) -> "CallScanner | WholeScanner":
        """The filter of one answer of this name."""
        return CallScanner(name) if self.form is HERMES else WholeScanner(name, self)


def calls_grammar(request: ChatRequest, form: CallForm) -> str:
    """Write the grammar of an answer that must call a tool, in this form.

    Raises: BadRequest where no tool is told that it could call, or no call can be held to their schemas.
    """
    told = [tool.get("function") for tool in request.tools or ()]
    functions = {name: one for one in told if isinstance(one, dict) and (name := _name(one)) is not None}
    if isinstance(request.tool_choice, dict):
        wanted = _name(request.tool_choice.get("function"))
        functions = {name: one for name, one in functions.items() if name == wanted}
    if not functions:
        raise BadRequest("tool_choice asks for a call, and no such function stands in tools", param="tool_choice")
    other = request.response_format
    if request.ignore_eos or request.structured_outputs or (other is not None and other.type != "text"):
        raise BadRequest("an answer that must call a tool has that form alone", param="tool_choice")
    several = request.parallel_tool_calls and request.tool_choice == "required"
    try:
        return bounded_grammar("lark", _rules(functions, form, several=bool(several)))
    except (GrammarError, RecursionError) as error:
        raise BadRequest(f"no call can be held to these tools: {error}", param="tools") from None


def _rules(functions: Mapping[str, Mapping[str, Any]], form: CallForm, *, several: bool) -> str:
    """The rules, in Lark, of a call of one of these functions, or of several calls."""
    more = f"({_quoted(form.between)} call){{0,{MOST_CALLS - 1}}}" if several and form.between is not None else ""
    before, behind = (_quoted(text) if text else "" for text in form.around)
    rules = [f"start: {before} call {more} {behind}"]
    rules += ["call: " + " | ".join(f"call{at}" for at in range(len(functions)))]
    for at, (name, function) in enumerate(functions.items()):
        begin = f'{form.each[0]}{{"name": {_quoted(name)}, "{form.arguments}": '
        rules += [f"call{at}: {_quoted(begin)} arguments{at} {_quoted('}' + form.each[1])}"]
        rules += [f"arguments{at}: %json {_quoted(_arguments(function))}"]
    return "\n".join(rules)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name(function: Any) -> str | None:
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object in any case. Raises: BadRequest for what is none."""
    given = function.get("parameters") or {}
    if not isinstance(given, dict):
        raise BadRequest("the parameters of a tool's function are a JSON schema: an object", param="tools")
    return drawn_schema({**given, "type": "object"})


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw(b"{}")  # their name in Llama's templates


def _as_call(call: _Call, name: str) -> ToolCall:
    """The call under this id. Raises: as msgspec, also where its arguments are no object."""
    arguments = bytes(call.arguments or call.parameters)
    if arguments.startswith(b'"'):  # JSON within a string
        arguments = msgspec.json.decode(arguments, type=str).strip().encode()
    msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    return ToolCall(id=f"call_{name}", function=ToolFunction(name=call.name, arguments=arguments.decode()))


_NO_CALL = (msgspec.MsgspecError, RecursionError, UnicodeEncodeError)


@final
class WholeScanner:
    """A filter for answers that are calls as a whole: it holds back what begins like JSON until the answer ends."""

    def __init__(self, name: str, reading: CallReading) -> None:
        self._name, self._reading = name, reading
        self._held: list[str] = []
        self._size = 0
        self._most = 64 + MOST_CHARACTERS
        self._decided = False
        self.found = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly no call."""
        self._held.append(text)
        self._size += len(text)
        if not self._decided and (head := self._body()) and not self._reading.form.mark.startswith(head):
            self._decided, self._most = True, self._most if head[0] in "[{" else 0
        if self._size <= (self._most if self._decided else 64):
            return "", []
        passed, self._held, self._most = "".join(self._held), [], 0
        return passed, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The calls that the whole answer was, or the text that was held back."""
        try:
            read = msgspec.json.decode(self._body(), type=list[_Call] | _Call)
            told = read if isinstance(read, list) else [read]
            if told and all(call.name in self._reading.functions for call in told):
                calls = [_as_call(call, f"{self._name}_{at}") for at, call in enumerate(told, 1)]
                self.found = len(calls)
                return "", calls
        except _NO_CALL:
            pass
        return "".join(self._held), []

    def _body(self) -> str:
        return "".join(self._held).lstrip().removeprefix(self._reading.form.mark).lstrip()


@final
class CallScanner:
    """A filter that takes the calls out of a text, wherever its pieces are cut; what is no call stays text."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the answer, which the ids of its calls begin with
        self._held: list[str] = []  # pieces of a call that has begun, or of what may become its mark
        self._held_size = 0
        self._open = False
        self._last = ""  # in which the mark behind an open call is searched
        self._called = False  # and nothing but blanks came since
        self.found = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain now; blanks behind a call are left out."""
        self._held.append(text)
        self._held_size += len(text)
        self._last = self._last[1 - len(END) :] + text
        if self._open and END not in self._last and self._held_size < len(BEGIN) + MOST_CHARACTERS:
            return "", []
        held, at = "".join(self._held), 0
        certain, calls, self._open = list[str](), list[ToolCall](), False
        while not self._open and (begin := held.find(BEGIN, at)) >= 0:
            certain.append(self._behind_calls(held[at:begin]))
            at, call = self._call(held, begin)
            self._open = at == begin
            if call is not None:
                calls.append(call)
                self._called = True
            else:
                certain.append(self._behind_calls(held[begin:at]))
        cut = at if self._open else len(held) - overlap(held[at:], BEGIN)
        certain.append(self._behind_calls(held[at:cut]))
        self._held, self._held_size = [held[cut:]], len(held) - cut
        return "".join(certain), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The text that was held back, now that nothing follows."""
        rest, self._held = "".join(self._held), []
        return self._behind_calls(rest), []

    def _behind_calls(self, text: str) -> str:
        """The text without the blanks that follow a call."""
        text = text.lstrip() if self._called else text
        self._called &= not text
        return text

    def _call(self, held: str, begin: int) -> tuple[int, ToolCall | None]:
        """The place behind a call that begins there, and the call; `begin` while it is open, None where it is none."""
        inside = at = begin + len(BEGIN)
        bound, behind = inside + MOST_CHARACTERS, inside
        for number in range(MOST_ENDS):
            end = held.find(END, at, bound)
            if end < 0:
                return (begin if len(held) < bound else behind), None
            at = end + len(END)
            behind = behind if number else at
            call = self._read(held[inside:end])
            if call is not None:
                return at, call
            if not _IN_STRING.match(held, inside, end):
                break
        return behind, None

    def _read(self, text: str) -> ToolCall | None:
        """The call that a text is; None for any other text."""
        try:
            call = _as_call(msgspec.json.decode(text, type=_Call), f"{self._name}_{self.found + 1}")
        except _NO_CALL:
            return None
        self.found += 1
        return call
