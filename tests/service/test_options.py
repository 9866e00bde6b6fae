"""Every option of every schema has words in /docs, works, and is refused by name; the tables of service.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.base.errors import Code
from dist_attn_service.engine.metrics import Metrics
from dist_attn_service.schemas.completions import ChatRequest, CompletionRequest, StreamOptions
from dist_attn_service.schemas.documents import (
    DetokenizeRequest,
    EmbeddingRequest,
    EncodingRequest,
    EstimateRequest,
    JobRequest,
    RerankRequest,
    SearchRequest,
    TokenizeRequest,
)
from pydantic import BaseModel

from tests.support.fake_engine import HIDDEN
from tests.support.metrics import samples
from tests.support.service_server import RunningService, model_folder, running_service

DOC = (Path(__file__).resolve().parents[2] / "docs/reference/service.md").read_text()

# option -> what works, and what is a 400 (for `model` a 404); other options of the same request stand in a tuple
Cases = dict[str, tuple[list[Any], list[Any]]]
NEUTRAL: Cases = {
    "metadata": ([{}, {"a": "b"}, None], [5]),
    "safety_identifier": (["me", None], [5]),
    "prompt_cache_key": (["me", None], [5]),
    "add_special_tokens": ([True, False, None], ["yes"]),
    "store": ([False, None], [True, 0]),
    "service_tier": (["auto", "default", None], ["flex"]),
    "response_format": (
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}, None],
        [{"type": "json_schema"}, {"type": "xml"}, {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}],
    ),
    "structured_outputs": (
        [{"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}, None],
        [{}, {"json": {}, "regex": "a"}, {"wat": 1}, {"json": "{"}, {"regex": "("}, {"choice": []}, {"grammar": "a"}],
    ),
    "length_penalty": ([1, 1.0, None], [2]),
    "use_beam_search": ([False, None], [True]),
    "early_stopping": ([False, None], [True]),
    "stop_token_ids": ([[], None], [[5]]),
    "bad_words": ([[], None], [["a"]]),
    "include_stop_str_in_output": ([False, None], [True]),
    "skip_special_tokens": ([True, None], [False]),
    "spaces_between_special_tokens": ([True, None], [False]),
    "truncate_prompt_tokens": ([None], [5]),
}
COMPLETIONS: Cases = {
    "model": (["tiny", None], ["other"]),
    "prompt": (["a", [97], ["a", "b"], [[97], [98]]], ["", [], [999], 5, ["a"] * 33]),
    "max_tokens": ([1, 16, None], [0, 65_537, "1"]),
    "min_tokens": ([0, 16, None], [17, -1, 0.5]),
    "ignore_eos": ([True, False, None], [1]),
    "temperature": ([0, 0.5, 2, 3, 1e300, None], [-1, "hot"]),
    "top_p": ([0.1, 1, None], [0, 1.1]),
    "top_k": ([0, -1, 5, None], [-2, 0.5]),
    "min_p": ([0, 0.05, 1, None], [-0.1, 1.1, False]),
    "seed": ([0, -5, (1 << 63) - 1, None], [1 << 63, 0.5]),
    "n": ([1, 3, None], [0, 33]),
    "best_of": ([1, 3, None], [0, 33]),
    "stop": (["x", ["x", "y"], [], None], ["", ["x"] * 17, "x" * 257]),
    "echo": ([True, False, None], [1, "yes"]),
    "logprobs": ([0, 5, None], [21, -1]),
    "stream": ([True, False, None], ["yes"]),
    "stream_options": ([None], [{"include_usage": True}, {"wat": 1}]),
    "stream_options.include_usage": ([True, False, None], ["yes"]),
    "stream_options.continuous_usage_stats": ([True, False, None], ["yes"]),
    "stream_options.include_obfuscation": ([False, None], [True]),
    "user": (["me", None], [5]),
    "suffix": (["", None], ["x"]),
    **NEUTRAL,
    "presence_penalty": ([0, 0.0, 0.5, -2, None], [2.1, "much"]),
    "frequency_penalty": ([0, 1, None], [-2.1]),
    "repetition_penalty": ([1, 1.1, 0.5, None], [0, -1, 101, True, "much"]),
    "priority": (["high", "normal", "low", None], ["urgent", 0]),
    "deadline_seconds": ([30, 0.5, None], [0, -1, 2_592_001, "1"]),
    "return_progress": ([False, None], [True, "yes"]),
    "logit_bias": ([{}, {"97": 1, "256": -100.0}, None], [{"257": 1}, {"a": 1}, {"-1": 1}, {"97": 101}, {"97": None}]),
}
MESSAGE = {"role": "user", "content": "abc"}
ANSWER = {"role": "assistant", "content": "def", "refusal": None, "tool_calls": [], "annotations": [], "audio": None}
MESSAGES_REFUSED: list[list[dict[str, Any]]] = [
    [],
    [{"role": "user"}],
    *([{**MESSAGE, **more}] for more in ({"role": "stranger"}, {"content": [{"type": "x"}]}, {"tool_calls": [{}]})),
]
CHATS: Cases = {
    "model": (["tiny", None], ["other"]),
    "messages": (
        [[MESSAGE], [{"role": "system", "content": "be brief"}, {**MESSAGE, "name": "me"}], [ANSWER, MESSAGE]],
        ["abc", *MESSAGES_REFUSED],
    ),
    "max_tokens": ([1, 16, None], [0, 65_537, "1"]),
    "max_completion_tokens": ([1, None], [0, 65_537]),
    **{name: COMPLETIONS[name] for name in ("temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "user")},
    "logprobs": ([True, False, None], [1]),
    "top_logprobs": ([None], [1, 21, -1]),
    **{name: COMPLETIONS[name] for name in ("presence_penalty", "frequency_penalty", "logit_bias", "stream_options")},
    **{name: COMPLETIONS[name] for name in ("priority", "deadline_seconds", "return_progress")},
    "min_tokens": ([0, 16, None], [1025, -1, 0.5]),
    **{name: COMPLETIONS[name] for name in ("ignore_eos", "min_p", "repetition_penalty")},
    **NEUTRAL,
    "parallel_tool_calls": ([True, False, None], [5]),
    "tools": ([[], None], [[{"type": "function", "function": {"name": "f"}}]]),
    "tool_choice": (["none", "auto", None], ["required"]),
    "functions": ([[], None], [[{"name": "f"}]]),
    "function_call": (["none", "auto", None], [{"name": "f"}]),
    "modalities": ([["text"], None], [["text", "audio"], []]),
    "audio": ([None], [{"voice": "alloy"}]),
    "prediction": ([None], [{"type": "content", "content": "a"}]),
    "reasoning_effort": ([None], ["low"]),
    "verbosity": ([None], ["low"]),
    "web_search_options": ([None], [{}]),
    "chat_template_kwargs": ([{}, {"a": 1}, None], [{"messages": []}, 5]),
    "documents": ([[], None], [[{"title": "t"}], [5], 5]),
    "add_generation_prompt": ([True, None], [False]),
    "continue_final_message": ([False, None], [True]),
}
EMBEDDINGS: Cases = {
    "model": (["tiny", None], ["other"]),
    "input": (["a", [97], ["a", "b"], [[97], [98]]], ["", [], [999], 5]),
    "encoding_format": (["float", "base64", None], ["hex"]),
    "dimensions": ([HIDDEN, 1, None], [HIDDEN + 1, 0]),
    "user": (["me", None], [5]),
    "safety_identifier": (["me", None], [5]),
    "truncate_prompt_tokens": ([None], [5]),
    "add_special_tokens": ([True, None], [False]),
}
ENCODINGS: Cases = {
    "model": (["tiny", None], ["other"]),
    "input": (["a"], ["", 5, ["a"]]),
    "file_id": ([None], ["file-x", 5]),
    "granularity": (["token", "window", "document", "sentence", "paragraph", "chapter"], ["page"]),
    "boundaries": ([[1], [1, 2], None], [[], [0], [2, 1], [9], [0.5], 5]),
    "window": ([1, 512, 1_000_000], [0, 1_000_001, 0.5]),
    "pooling": (["mean", "last"], ["max"]),
    "format": (["ndjson", "arrow", "npy"], ["xml"]),
    "from_row": ([0, 1, 1 << 53], [-1, (1 << 53) + 1, 0.5]),
}
TOKENIZE: Cases = {
    "model": (["tiny", None], ["other"]),
    "prompt": (["", "a"], [5, ["a"]]),
    "add_special_tokens": ([True, False, None], ["yes"]),
    "inputs": ([None], [5, [], "a text beside prompt"]),
    "return_token_strs": ([True, False, None], [1]),
}
ESTIMATES: Cases = {
    "model": (["tiny", None], ["other"]),
    "input": (["a", ""], [5]),
    "file_id": ([None], ["file-x", 5]),
    "bytes": ([1000, None], [2, -1, 0.5]),
    "tokens": ([None], [-1, "5"]),
    "granularity": (["token", "window", "document"], ["page"]),
    "window": ([1, 512, None], [0, 1_000_001, 0.5]),
    "max_tokens": ([1, 1000, None], [0, 0.5]),
}
JOBS: Cases = {
    "model": (["tiny", None], ["other"]),
    "input": (["a"], ["", 5]),
    "file_id": ([None], ["file-x", 5]),
    "granularity": (["token", "window", "document", "sentence", "paragraph", "chapter", None], ["page"]),
    "window": ([1, 512, None], [0, 1_000_001, 0.5]),
    "pooling": (["mean", "last", None], ["max"]),
    "boundaries": ENCODINGS["boundaries"],
    "completion": ([None], [5]),
}
HOW_SOON: Cases = {name: COMPLETIONS[name] for name in ("priority", "deadline_seconds")}
SEARCH: Cases = {
    "model": (["tiny", None], ["other"]),
    "query": (["a", "ab c"], ["", " ", "a" * 8193, 5]),
    "documents": (
        [["a"], [{"text": "a"}], [{"id": "a", "text": "a"}, {"text": "a"}]],
        [[], [{}], [{"text": ""}], [{"text": "a", "file_id": "file-x"}], [{"text": "a"}] * 257, [5], "a"],
    ),
    "mode": (["hybrid", "dense", "lexical"], ["both", None]),
    "top_k": ([1, 100], [0, 101, 0.5]),
    "granularity": (["window", "document", "sentence", "paragraph", "chapter"], ["token", "page"]),
    "window": ([1, 512, None], [0, 1_000_001, 0.5]),
    **HOW_SOON,
}
RERANK: Cases = {
    "model": (["tiny", None], ["other"]),
    "query": (["a"], ["", " ", 5]),
    "documents": ([["a"], [{"text": "a", "title": 1}, "b"]], [[], [""], [{"wat": "a"}], "a", None]),
    "texts": ([None], [["a"], [], "a"]),
    "top_n": ([1, 1000, None], [0, 0.5]),
    "return_documents": ([True, False, None], [1]),
    "return_text": ([True, False, None], ["yes"]),
    "max_tokens_per_doc": ([1, 4096, None], [0, "9"]),
    "max_chunks_per_doc": ([10, None], ["9"]),
    "rank_fields": ([["text"], None], [["title"], ["title", "text"], []]),
    "truncation": ([True, False, None], [1]),
    "truncate": ([True, False, None], [1]),
    "truncation_direction": (["right", "Right", None], ["left"]),
    "raw_scores": ([True, False, None], [1]),
    **HOW_SOON,
}
DETOKENIZE: Cases = {"model": (["tiny", None], ["other"]), "tokens": ([[], [97]], [[999], ["a"], "a"])}
FAMILIES: list[tuple[str, type[BaseModel], dict[str, Any], Cases]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "abc"}, COMPLETIONS),
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE]}, CHATS),
    ("/v1/embeddings", EmbeddingRequest, {"input": "abc"}, EMBEDDINGS),
    ("/v1/encodings", EncodingRequest, {"input": "abc"}, ENCODINGS),
    ("/v1/search", SearchRequest, {"query": "abc", "documents": [{"text": "abc"}]}, SEARCH),
    ("/v1/rerank", RerankRequest, {"query": "abc", "documents": ["abc"]}, RERANK),
    ("/v1/jobs", JobRequest, {"input": "abc"}, JOBS),
    ("/v1/estimate", EstimateRequest, {"input": "abc"}, ESTIMATES),
    ("/tokenize", TokenizeRequest, {"prompt": "abc"}, TOKENIZE),
    ("/detokenize", DetokenizeRequest, {"tokens": [97]}, DETOKENIZE),
]


def table(title: str) -> list[list[str]]:
    """The rows of the first table below a heading of the page, their cells without marks."""
    section = re.split(rf"^#+ {title}$", DOC, flags=re.M)[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with the limits as they are by default."""
    folder = tmp_path_factory.mktemp("service")
    model = model_folder(folder)
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with running_service(folder, model=model) as running:
        yield running


@pytest.mark.parametrize(("kind", "cases"), [(f[1], f[3]) for f in FAMILIES], ids=[f[0] for f in FAMILIES])
def test_every_option_has_words_and_cases(kind: type[BaseModel], cases: Cases) -> None:
    """The schema says of each field what it does, and each is tried below."""
    fields = kind.model_json_schema()["properties"]
    if kind is CompletionRequest:
        inner = StreamOptions.model_json_schema()["properties"]
        fields |= {f"stream_options.{name}": field for name, field in inner.items()}
    assert set(cases) == set(fields)
    assert [name for name, field in fields.items() if not field.get("description")] == []


@pytest.mark.parametrize(
    ("path", "body", "option", "works", "refused"),
    [
        pytest.param(path, body, option, *values, id=f"{path}-{option}")
        for path, _, body, cases in FAMILIES
        for option, values in cases.items()
    ],
)
def test_every_option_works_or_is_refused_by_name(
    service: RunningService, path: str, body: dict[str, Any], option: str, works: list[Any], refused: list[Any]
) -> None:
    """A value that works is answered (200, 202 for jobs), any other a 400 (404 for the model) that names the option."""
    outer, _, inner = option.partition(".")

    def ask(value: Any) -> httpx.Response:
        given = {**body, "stream": True, outer: {inner: value}} if inner else {**body, outer: value}
        return client.post(path, json=given)

    with httpx.Client(base_url=service.url, timeout=60) as client:
        for value in works:
            answer = ask(value)
            assert answer.status_code == (202 if path == "/v1/jobs" else 200), (value, answer.text)
            assert '"error":{' not in answer.text
        for value in refused:
            answer = ask(value)
            assert answer.status_code == (404 if option == "model" else 400), (value, answer.text)
            assert answer.json()["error"]["param"].split(".")[0] == outer, (value, answer.text)


def test_two_that_exclude_each_other(service: RunningService) -> None:
    """`stream_options` without `stream`, no tokens without `echo`, and a `best_of` that cannot be are refused."""
    for body, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ):
        answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a", **body})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_every_error_code_is_in_the_table() -> None:
    """The page lists the closed set of codes, each once."""
    listed = [name for row in table("Errors") for name in names(row[0])]
    assert sorted(listed) == sorted(map(str, Code))


def test_every_metric_is_in_the_table(service: RunningService) -> None:
    """The page lists what /metrics tells, but for the process's own figures."""
    httpx.get(f"{service.url}/livez")
    told = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name, _ in samples(service)}
    told = {name + "_total" if f"{name}_total" in told else name for name in told if name.startswith("dist_attn_")}
    listed = {name for row in table("Metrics") for name in names(row[0])}
    assert listed == told
    assert Metrics().render("")[1].startswith("text/plain")
