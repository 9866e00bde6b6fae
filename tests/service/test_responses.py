"""POST /v1/responses through OpenAI's own client: a chat, told as items and events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_engine import FakeEngine, say
from tests.support.opening import is_completion
from tests.support.service_server import RunningService, model_folder, running_service

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}{{ tools }}<tool_call>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"in": "Rome"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service whose model says the same every time: a text and a call."""
    folder = tmp_path_factory.mktemp("service")
    model = model_folder(folder)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running_service(folder, FakeEngine(reply=say(f"Well.\n{CALL}".encode())), model=model) as running:
        yield running


@pytest.fixture
def client(service: RunningService) -> openai.OpenAI:
    """OpenAI's client of that service."""
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def test_a_text_and_its_events(client: openai.OpenAI) -> None:
    """Whole and streamed: the same items; the events come in OpenAI's order, numbered from 0."""
    whole = client.responses.create(model="tiny", input="hi", instructions="Be kind.", temperature=0)
    assert whole.output_text == f"Well.\n{CALL}" and whole.status == "completed"
    assert whole.usage is not None and whole.usage.output_tokens == len(whole.output_text) + 1
    assert (whole.instructions, whole.temperature, whole.tools) == ("Be kind.", 0, [])
    with client.responses.stream(model="tiny", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    at = kinds.index("output_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:at]) == {"output_text.delta"}
    assert kinds[at:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=4)
    assert (cut.status, cut.output_text) == ("incomplete", "Well")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_calls_are_items(client: openai.OpenAI, service: RunningService) -> None:
    """A call follows the text before it; sent back with its answer it stands in the assistant's message."""
    whole = client.responses.create(model="tiny", input="hi", tools=TOOLS)
    text, call = whole.output
    assert text.type == "message" and whole.output_text.strip() == "Well."
    assert call.type == "function_call" and json.loads(call.arguments) == {"in": "Rome"}
    with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        last: Any = stream.get_final_response().output[-1]
    assert last.name == "weather" and json.loads(last.arguments) == {"in": "Rome"}
    done = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"]
    assert kinds[-5:] == ["output_item.added", *done]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    history: Any = [{"role": "user", "content": "hi"}, *whole.output, answer]
    service.engine.received.clear()
    client.responses.create(model="tiny", input=history, tools=TOOLS)
    tokens = b"".join(message.tokens for message in service.engine.received if hasattr(message, "tokens"))
    prompt = bytes(tokens[::4]).decode()
    assert "user:hi;assistant:Well." in prompt and "'name': 'weather'" in prompt and "tool:sun;" in prompt


def test_blanks_before_a_call_are_no_message(tmp_path: Path) -> None:
    """Whole and streamed, the call is the only item; blanks alone are a message."""
    model = model_folder(tmp_path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running_service(tmp_path, FakeEngine(reply=say(f"\n\n{CALL}".encode())), model=model) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
        whole = client.responses.create(model="tiny", input="hi", tools=TOOLS)
        with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            streamed = stream.get_final_response()
        assert [item.type for item in whole.output] == [item.type for item in streamed.output] == ["function_call"]
        with client.responses.stream(model="tiny", input="hi", tools=TOOLS, max_output_tokens=2) as stream:
            last: Any = list(stream)[-1]
        assert (last.type, last.response.output_text) == ("response.incomplete", "\n\n")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"background": True}, "background", "a job of /v1/jobs"),
        ({"store": True}, "store", "answers are not kept"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"max_output_tokens": 1 << 40}, "max_output_tokens", "over this service's limit"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "json_schema needs a schema"),
        ({"input": [{"type": "reasoning"}]}, "input", "function_call"),
        ({"input": [{"role": "user", "contents": "hi"}]}, "input", "a message needs content"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input", "a function_call needs name"),
        ({"input": []}, "input", "input"),
    ],
)
def test_what_is_refused(service: RunningService, body: dict[str, Any], param: str, words: str) -> None:
    """What would need an earlier answer, another tool or another input: by its name in this route."""
    answer = httpx.post(f"{service.url}/v1/responses", json={"input": "hi", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert error["param"].startswith(param)


def test_forms_are_followed(tmp_path: Path) -> None:
    """`text.format` holds the answer to its schema: the engine gets the grammar that chats give it."""
    model = model_folder(tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with running_service(tmp_path, FakeEngine(), model=model) as service:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        asked = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
        for route, body in (
            ("responses", {"input": "hi", "text": asked}),
            ("chat/completions", {
                "messages": [{"role": "user", "content": "hi"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            }),
        ):  # fmt: skip
            assert httpx.post(f"{service.url}/v1/{route}", json=body, timeout=60).status_code == 200
        first, second = (message.draw for message in service.engine.received if is_completion(message))
        assert first is not None and second is not None and first.grammar == second.grammar != ""
