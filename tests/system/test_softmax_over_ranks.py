"""A model with exact attention over three ranks, over HTTP: rows, texts, sessions, and answers of a schema."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.generation import generate
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import SamplingSpec
from tests.support.closeness import assert_close
from tests.support.models import write_small_folder
from tests.support.served import Served, served
from tests.support.sessions import SessionClient
from tests.support.tokenisers import PROSE
from tests.support.waiting import eventually

RANKS, WINDOW, SECONDS = 3, 300, 120.0
TEXT = (9 * PROSE.encode())[:17_003]  # many blocks of three ranks, and the end is on no grid
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "colour": {"enum": ["green", "blue"]}},
        "required": ["name", "colour"],
        "additionalProperties": False,
    },
    "minItems": 6,
    "maxItems": 6,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "rows", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, of which one layer has states of one size and the other keys of all tokens."""
    folder = write_small_folder(tmp_path_factory.mktemp("hybrid") / "tiny", kind="hybrid")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return folder


@pytest.fixture(scope="module")
def rows(model: Path) -> torch.Tensor:
    """Means over windows of the hidden states that one rank computes in one go."""
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.inference_mode():
        hidden_LD = load_model(model).encode(tokens[None])[0]
    return torch.stack([window.mean(0) for window in hidden_LD.split(WINDOW)])


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service of it."""
    with served(tmp_path_factory.mktemp("served"), ranks=RANKS, model=model) as whole:
        yield whole


def test_http(model: Path, rows: torch.Tensor, running: Served) -> None:
    """Rows are those of one rank, a prompt is completed as one rank does, and nothing listens beyond loopback."""
    url = f"{running.url}/v1/encodings?granularity=window&window={WINDOW}"
    lines = httpx.post(url, content=TEXT, timeout=SECONDS).text.splitlines()
    *got, summary = map(json.loads, lines)
    assert (summary["object"], summary["tokens"]) == ("encoding.summary", len(TEXT))
    assert [row["index"] for row in got] == list(range(len(rows)))
    assert_close(torch.tensor([row["embedding"] for row in got]), rows)
    prompt = TEXT[:3000].decode()
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=SECONDS).json()
    with torch.inference_mode():
        drawn = generate(load_model(model), ByteTokeniser().encode(prompt.encode()), SamplingSpec(8, temperature=0.0))
    assert answer["choices"][0]["text"] == ByteTokeniser().decode(drawn).decode(errors="replace")
    listening = running.listening()
    assert {"rank 1", "rank 2", "rank 3"} <= {role for role, _ in listening}  # or the interface was not looked at
    assert [entry for entry in listening if not entry[1].startswith("127.0.0.1:")] == []


def test_a_session_says_what_a_completion_says(running: Served) -> None:
    """What a session that was fed in parts draws, and its fork, is what a completion of the whole draws; also from the
    state that was stored of its prompt.
    """
    text, client = TEXT[:5000], SessionClient(running.url, seconds=SECONDS)
    body = {"prompt": text.decode(), "max_tokens": 12, "temperature": 0, "logit_bias": {"256": -100}}
    whole, *again = [client.post("/v1/completions", json=body).json()]

    def taken_from_a_state() -> bool:
        again.append(client.post("/v1/completions", json=body).json())
        return bool(again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4608)

    # It is stored behind the answer, whenever a busy machine gets there.
    eventually(taken_from_a_state, "the prompt's state to be stored")
    session = client.make()
    for part in (text[:700], text[700:701], text[701:]):
        last = client.append(session, part)
    assert last.position == len(text)
    fork = client.post(f"/v1/sessions/{session}/fork").json()["id"]

    def said(session: str, tokens: int) -> str:
        asked = {"max_tokens": tokens, "temperature": 0, "logit_bias": {"256": -100}}
        answer = client.post(f"/v1/sessions/{session}/generate", json=asked).json()
        return str(answer["choices"][0]["text"])

    told = [said(session, 5) + said(session, 7), said(fork, 12), *(answer["choices"][0]["text"] for answer in again)]
    assert set(told) == {whole["choices"][0]["text"]}


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
            if chunks == 40:
                on_text()
    assert reasons == ["stop", "stop"] and chunks > 40
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


def test_every_answer_is_of_the_schema_and_outlives_a_rank(running: Served) -> None:
    """Two choices at temperature 1, of completions and of chats: valid whatever the model, and the same bits when a
    rank is killed in the middle.
    """
    body = {"prompt": "The colours are " * 20}
    undisturbed = answers(running.url, "/v1/completions", body)
    for text in undisturbed:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(undisturbed)) == 2
    assert answers(running.url, "/v1/completions", body, running.parts()["rank 1"].kill) == undisturbed
    for text in answers(running.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}):
        jsonschema.validate(json.loads(text), SCHEMA)
    texts = [of_session(running.url, session) for session in forked(running.url)]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert texts[0] == texts[1]
