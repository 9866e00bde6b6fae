"""Answers of a schema from a whole service: valid whatever the model, and the same bits when a rank is killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from tests.support.models import write_small_folder
from tests.support.served import served

SECONDS = 120.0
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "colour": {"enum": ["green", "blue"]}},
        "required": ["name", "colour"],
        "additionalProperties": False,
    },
    "minItems": 12,
    "maxItems": 12,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "rows", "strict": True, "schema": SCHEMA}}


def answers(url: str, route: str, body: dict[str, Any], on_text: Callable[[], object] = lambda: None) -> list[str]:
    """The texts of both choices, streamed; `on_text` is called once, in the middle of them."""
    texts, chunks, reasons = ["", ""], 0, []
    asked = {**body, "n": 2, "seed": 7, "max_tokens": 4000, "stream": True, "response_format": FORMAT}
    with httpx.stream("POST", url + route, json=asked, timeout=SECONDS) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            chunks += 1
            if chunks == 60:
                on_text()
    assert reasons == ["stop", "stop"]
    return texts


def forked(url: str) -> tuple[str, str]:
    """A session that has read a text, and a fork of it."""
    session = httpx.post(f"{url}/v1/sessions", json={}).json()["id"]
    httpx.post(f"{url}/v1/sessions/{session}/append", content=b"The colours are ", timeout=SECONDS).raise_for_status()
    return session, httpx.post(f"{url}/v1/sessions/{session}/fork", json={}).json()["id"]


def of_session(url: str, session: str) -> str:
    """The text of the schema with which a session goes on."""
    asked = {"seed": 7, "max_tokens": 4000, "response_format": FORMAT}
    answer = httpx.post(f"{url}/v1/sessions/{session}/generate", json=asked, timeout=SECONDS).json()
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return str(answer["choices"][0]["text"])


def test_every_answer_is_of_the_schema_and_outlives_a_rank(tmp_path: Path) -> None:
    """Two choices at temperature 1 over two ranks, of completions and of chats; one rank dies in the middle."""
    model = write_small_folder(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with served(tmp_path, ranks=2, model=model) as whole:
        body = {"prompt": "The colours are " * 20}
        undisturbed = answers(whole.url, "/v1/completions", body)
        for text in undisturbed:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(undisturbed)) == 2
        assert answers(whole.url, "/v1/completions", body, whole.parts()["rank 1"].kill) == undisturbed
        for text in answers(whole.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}):
            jsonschema.validate(json.loads(text), SCHEMA)
        texts = [of_session(whole.url, session) for session in forked(whole.url)]
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
        assert texts[0] == texts[1]
