"""Tools in chats: calls are taken out of the text wherever it is cut; where one is asked for nothing else is drawn."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from dist_attn_service.completions.tool_calls import (
    LLAMA,
    MISTRAL,
    MOST_CALLS,
    CallForm,
    CallReading,
    CallScanner,
    WholeScanner,
)

from dist_attn.text import ByteTokeniser
from dist_attn.text.grammars import FollowedGrammar, Grammars
from tests.support.fake_engine import FakeEngine, say
from tests.support.opening import draw_of, is_completion
from tests.support.service_server import RunningService, model_folder, running_service

TEMPLATE = "{{ tools | tojson }}<tool_call>{{ messages[-1].content }}"
PLACE = {
    "type": "object",
    "properties": {"in": {"$ref": "#/$defs/where"}},
    "required": ["in"],
    "additionalProperties": False,
    "$defs": {"where": {"enum": ["Oslo", "Rome"]}},
}
NOTHING = {"properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock", "parameters": NOTHING}},
]
SCHEMAS = {"weather": PLACE, "clock": NOTHING}
BAD = {"function": {"name": "f", "parameters": {"not": {}}}}
TEXTUAL = '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"in": "Rome"}}\n</tool_call>'
IN_STRING = '{"a": "\\"{</tool_call> ]"}'
MARKED = f'<tool_call>{{"name": "f", "arguments": {IN_STRING}}}</tool_call>'
CHAT: Any = [{"role": "user", "content": "a"}]


def scanned(
    text: str, size: int = 1000, scanner: CallScanner | WholeScanner | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in pieces."""
    scanner, rest, calls = scanner or CallScanner("x"), "", []
    for at in range(0, len(text) + size, size):
        more, found = scanner.push(text[at : at + size]) if at < len(text) else scanner.finish()
        rest, calls = rest + more, [*calls, *((call.function.name, call.function.arguments) for call in found)]
    return rest, calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("", "", []),
        ("a <tool", "a <tool", []),
        (f"So: {CALL}\n{CALL}\n", "So: ", [("weather", '{"in": "Rome"}')] * 2),
        ("<tool_call>{}</tool_call>b", "<tool_call>{}</tool_call>b", []),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        (f" a {MARKED} \n b \n{CALL} c ", " a b \nc ", [("f", IN_STRING), ("weather", '{"in": "Rome"}')]),
        (f'<tool_call>"</tool_call>\n{CALL} ', '<tool_call>"</tool_call>\n', [("weather", '{"in": "Rome"}')]),
        (f"<tool_call>{CALL}", f"<tool_call>{CALL}", []),
        (
            f'<tool_call>"{20 * "</tool_call>"}{CALL}',
            f'<tool_call>"{20 * "</tool_call>"}',
            [("weather", '{"in": "Rome"}')],
        ),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [],
        ),
    ],
)
def test_calls_are_taken_out_wherever_the_text_is_cut(text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    """What is no whole call stays text, character for character."""
    for size in (1, 3, 7, 1000):
        assert scanned(text, size) == (rest, calls), size


WEATHER, CLOCK = ("weather", '{"in": "Rome"}'), ("clock", "{}")
MISTRALS = '[{"name": "weather", "arguments": {"in": "Rome"}}, {"name": "clock", "arguments": {}}]'
LLAMAS = '{"name": "weather", "parameters": {"in": "Rome"}}'


@pytest.mark.parametrize(
    ("form", "text", "rest", "calls"),
    [
        (MISTRAL, MISTRALS, "", [WEATHER, CLOCK]),
        (MISTRAL, f"[TOOL_CALLS] {MISTRALS}\n", "", [WEATHER, CLOCK]),
        (MISTRAL, f" {LLAMAS}", "", [WEATHER]),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        (MISTRAL, "[TOOL_CALLS", "[TOOL_CALLS", []),
        (LLAMA, LLAMAS, "", [WEATHER]),
        (LLAMA, f"<|python_tag|>{LLAMAS}", "", [WEATHER]),
        (LLAMA, f"Here: {LLAMAS}", f"Here: {LLAMAS}", []),
        (LLAMA, '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        (LLAMA, '{"name": "weather", "parameters": 5}', '{"name": "weather", "parameters": 5}', []),
        (LLAMA, "{" * 20_000, "{" * 20_000, []),
        (LLAMA, " " * 200, " " * 200, []),
        (LLAMA, "", "", []),
    ],
)
def test_answers_that_are_calls_as_a_whole(form: CallForm, text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    """Only calls of the functions that were told of, in Mistral's and Llama's form; any other answer stays text."""
    reading = CallReading(form, frozenset({"weather", "clock"}), alone=False)
    for size in (1, 5, 1000):
        assert scanned(text, size, reading.scanner("x")) == (rest, calls), size


@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 22])
def test_a_call_without_end_goes_out_as_text(size: int) -> None:
    """At one mebibyte, whatever its pieces; what follows is read as ever."""
    long = '<tool_call>{"name": "' + "a" * (1 << 20)
    assert scanned(long + CALL, size) == (long, [("weather", '{"in": "Rome"}')])


def test_an_open_call_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces are not gone through again at each of them."""
    scanner, read = CallScanner("x"), list[int]()
    whole = CallScanner._call
    monkeypatch.setattr(CallScanner, "_call", lambda self, held, at: read.append(len(held)) or whole(self, held, at))
    for _ in range(5000):
        assert scanner.push('{"a":' if read else "<tool_call>") == ("", [])
    assert scanner.push("</tool_call>")[0].startswith("<tool_call>{") and len(read) == 2


def ask(service: RunningService, **body: Any) -> httpx.Response:
    """The answer to a chat with tools."""
    return httpx.post(f"{service.url}/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS, **body}, timeout=60)


def opened(folder: Path, reply: str = CALL, template: str = TEMPLATE) -> Any:
    """A service with that template, whose engine says the same every time."""
    model = model_folder(folder)
    (model / "chat_template.jinja").write_text(template)
    return running_service(folder, FakeEngine(reply=say(reply.encode())), model=model)


def test_calls_have_openais_shape(tmp_path: Path) -> None:
    """Whole and as a stream, in OpenAI's own client; without tools, or with none to call, the text stays text."""
    with opened(tmp_path, f"Well.\n{CALL}\n{CALL}") as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        tools: Any = TOOLS
        choice = client.chat.completions.create(model="tiny", messages=CHAT, tools=tools).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"in": "Rome"})
        ] * 2
        assert len({call.id for call in calls}) == 2
        pieces: list[Any] = list(client.chat.completions.create(model="tiny", messages=CHAT, tools=tools, stream=True))
        deltas = [piece.choices[0].delta for piece in pieces]
        assert "".join(delta.content or "" for delta in deltas).strip() == "Well."
        streamed = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(call.index, call.function.arguments) for call in streamed] == [
            (at, call.function.arguments) for at, call in enumerate(calls)
        ]
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        for body in ({"tools": None}, {"tool_choice": "none"}):
            (plain,) = ask(service, **body).json()["choices"]
            assert (plain["message"]["content"], plain["finish_reason"]) == (f"Well.\n{CALL}\n{CALL}", "stop")


@pytest.mark.parametrize(
    ("more", "names", "most"),
    [
        ({"tool_choice": "required"}, {"weather", "clock"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}, 1),
        ({"tool_choice": "required", "parallel_tool_calls": True}, {"weather", "clock"}, MOST_CALLS),
    ],
)
def test_a_call_that_is_asked_for_is_all_that_is_drawn(
    more: dict[str, Any], names: set[str], most: int, tmp_path: Path
) -> None:
    """Whatever is drawn under the grammar that the engine is told is calls of these functions by their schemas."""
    with opened(tmp_path) as service:
        assert ask(service, **more).status_code == 200
        grammar = draw_of([message for message in service.engine.received if is_completion(message)][-1]).grammar
    drawn, rng, called, numbers = Grammars(ByteTokeniser, [256]), random.Random(3), set(), set()
    for _ in range(30):
        followed, text = FollowedGrammar(drawn, grammar), b""
        while (token := rng.choice(np.flatnonzero(followed.allowed()).tolist())) != 256:
            followed.take(token)
            text += bytes([token])
        rest, calls = scanned(text.decode(), 1 << 20)
        assert rest == "" and calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            called.add(name)
        numbers.add(len(calls))
    assert called == names and (max(numbers) > 1) == (most > 1)
    ended = FollowedGrammar(drawn, grammar, "\n".join([CALL] * most).encode())
    assert np.flatnonzero(ended.allowed()).tolist() == [256]


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "no such function"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tool_choice", "no such function"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "that form alone"),
        (
            {"tool_choice": "required", "tools": [BAD]},
            "tools",
            '"not"',
        ),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools", "an object"),
        ({"tool_choice": "always"}, "tool_choice", "always"),
    ],
)
def test_calls_that_cannot_be_asked_for(body: dict[str, Any], param: str, word: str, tmp_path: Path) -> None:
    """Each is a 400 that names the option."""
    with opened(tmp_path) as service:
        answer = ask(service, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "reply", "calls"),
    [
        (TEMPLATE, f"{CALL}\n{CALL}", [WEATHER, WEATHER]),
        ("[TOOL_CALLS]", MISTRALS, [WEATHER, CLOCK]),
        ("<|python_tag|>", LLAMAS, [WEATHER]),
        ("""{{ '"parameters": ' }}""", LLAMAS, [WEATHER]),
    ],
)
def test_forms_are_those_of_the_template(
    template: str, reply: str, calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Whole and streamed; `parallel_tool_calls: false` leaves the first; what is asked for is drawn in that form."""
    with opened(tmp_path, reply, template + "{{ tools | tojson }}") as service:
        for more, wanted in (({}, calls), ({"parallel_tool_calls": False}, calls[:1])):
            choice = ask(service, **more).json()["choices"][0]
            told = [
                (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
            ]
            assert (told, choice["finish_reason"], choice["message"]["content"]) == (wanted, "tool_calls", None)
            events = [line for line in ask(service, stream=True, **more).text.splitlines() if "tool_calls" in line]
            assert events[-1].count('"tool_calls"') == 1 and sum("weather" in line for line in events) >= 1
            assert sum(line.count('"arguments"') for line in events) == len(wanted)
        assert ask(service, tool_choice="required", parallel_tool_calls=True).status_code == 200
        grammar = draw_of([message for message in service.engine.received if is_completion(message)][-1]).grammar
    followed = FollowedGrammar(Grammars(ByteTokeniser, [256]), grammar)
    for byte in reply.encode():
        assert followed.allowed()[byte], reply
        followed.take(byte)
    assert followed.allowed()[256]


def test_a_template_that_writes_calls_otherwise(tmp_path: Path) -> None:
    """Its calls stand in the text as drawn, and none can be asked for."""
    with opened(tmp_path, template="{{ tools | tojson }}") as service:
        assert ask(service).json()["choices"][0]["message"]["content"] == CALL
        refused = ask(service, tool_choice="required")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
