"""Calls of tools in an answer, as the templates of Hermes and Qwen have them written: JSON between two marks."""

import json
from collections.abc import Mapping
from typing import Any, final

import msgspec

from dist_attn.errors import GrammarError
from dist_attn.text.grammars import drawn_schema
from dist_attn_service.base.errors import BadRequest
from dist_attn_service.completions.bounded_grammar import bounded_grammar
from dist_attn_service.schemas.completions import ChatRequest, ToolCall, ToolFunction
from dist_attn_service.text.choice_text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


def calls_grammar(request: ChatRequest) -> str:
    """Write the grammar of an answer that must call a tool.

    Raises: BadRequest where no tool is told that it could call, or no call can be held to their schemas.
    """
    told = [tool.get("function") for tool in request.tools or ()]
    functions = {name: one for one in told if isinstance(one, dict) and (name := _name(one)) is not None}
    if isinstance(request.tool_choice, dict):
        wanted = _name(request.tool_choice.get("function"))
        functions = {name: one for name, one in functions.items() if name == wanted}
    if not functions:
        raise BadRequest("tool_choice asks for a call, and no such function stands in tools", param="tool_choice")
    form = request.response_format
    if request.ignore_eos or request.structured_outputs or (form is not None and form.type != "text"):
        raise BadRequest("an answer that must call a tool has that form alone", param="tool_choice")
    several = request.parallel_tool_calls and request.tool_choice == "required"
    try:
        return bounded_grammar("lark", _rules(functions, several=bool(several)))
    except (GrammarError, RecursionError) as error:
        raise BadRequest(f"no call can be held to these tools: {error}", param="tools") from None


def _rules(functions: Mapping[str, Mapping[str, Any]], *, several: bool) -> str:
    """The rules, in Lark, of a call of one of these functions, or of several calls."""
    rules = [r'start: call ("\n" call)*' if several else "start: call"]
    rules += ["call: " + " | ".join(f"call{at}" for at in range(len(functions)))]
    for at, (name, function) in enumerate(functions.items()):
        begin, end = f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{END}"
        rules += [f"call{at}: {json.dumps(begin)} arguments{at} {json.dumps(end)}"]
        rules += [f"arguments{at}: %json {json.dumps(_arguments(function))}"]
    return "\n".join(rules)


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
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


@final
class CallScanner:
    """A filter that takes the calls out of a text, wherever its pieces are cut; what is no call stays text."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the answer, which the ids of its calls begin with
        self._held = ""
        self.found = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain now; blanks behind a call are left out."""
        self._held += text
        certain, calls = "", list[ToolCall]()
        while BEGIN in self._held:
            before, _, rest = self._held.partition(BEGIN)
            inside, end, after = rest.partition(END)
            if not end:
                certain, self._held = certain + before, BEGIN + rest
                break
            call = self._read(inside)
            certain, self._held = certain + (before if call else before + BEGIN + inside + END), after
            calls += [call] if call else []
        else:
            cut = len(self._held) - overlap(self._held, BEGIN)
            certain, self._held = certain + self._held[:cut], self._held[cut:]
        return certain if certain.strip() or not self.found else "", calls

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        rest, self._held = self._held, ""
        return rest

    def _read(self, text: str) -> ToolCall | None:
        """The call that a text is; None for any other text."""
        try:
            call = msgspec.json.decode(text, type=_Call)
        except (msgspec.MsgspecError, RecursionError):
            return None
        arguments = bytes(call.arguments).decode()
        if not arguments.startswith("{"):
            return None
        self.found += 1
        return ToolCall(
            id=f"call_{self._name}_{self.found}", function=ToolFunction(name=call.name, arguments=arguments)
        )
