"""Everything that is not usable: a clear 4xx in one shape, and the service goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from dist_attn_service.base import parsing
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.parsing import parse_query
from dist_attn_service.schemas.completions import ChatRequest, CompletionRequest
from dist_attn_service.schemas.documents import DetokenizeRequest, EncodingOptions, SearchRequest
from pydantic import BaseModel

from tests.support.service_server import RunningService, running_service

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service; nothing here may harm it."""
    with running_service(tmp_path_factory.mktemp("service"), json_body_bytes=100_000) as running:
        yield running


def check_problem(answer: httpx.Response, status: int, code: str, param: str | None, *words: str) -> None:
    """The answer is a problem document with OpenAI's error object in it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status and problem["title"] and problem["type"].endswith(code)
    assert problem["instance"] == answer.headers["x-request-id"]
    error = problem["error"]
    assert error["code"] == code and error["param"] == param
    assert error["type"] in ("invalid_request_error", "rate_limit_error", "server_error")
    assert error["message"] == problem["detail"]
    for word in words:
        assert word in error["message"], error["message"]


# What tests/service/test_options.py refuses as well stands here only where the words say more.
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({"model": "nope"}, 404, "model_not_found", "model", "'nope'"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens", "echo=true"),
    ({"max_tokens": -1}, 400, "invalid_value", "max_tokens", "-1"),
    ({"max_tokens": "5"}, 400, "invalid_value", "max_tokens", "'5'"),
    ({"max_tokens": 1.5}, 400, "invalid_value", "max_tokens", "1.5"),
    ({"max_tokens": True}, 400, "invalid_value", "max_tokens", "True"),
    ({"max_tokens": 10**9}, 400, "invalid_value", "max_tokens", "65536"),
    ({"wat": 1}, 400, "unknown_parameter", "wat", "'wat'"),
    ({"stream_options": {"wat": 1}, "stream": True}, 400, "unknown_parameter", "stream_options.wat", "wat"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options", "stream=true"),
    ({"temprature": 3}, 400, "unknown_parameter", "temprature", "did you mean temperature?"),
    ({"min_tokens": 5, "max_tokens": 4}, 400, "invalid_value", "min_tokens", "max_tokens=4"),
    ({"length_penalty": 2}, 400, "unsupported_parameter", "length_penalty", "length_penalty=2 is not offered: only 1"),
    ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty", "0.01"),
    ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format.json_schema", "a schema"),
    ({"structured_outputs": {"json": {"not": {}}}}, 400, "invalid_value", "structured_outputs.json", '["not"]'),
    ({"structured_outputs": {"regex": "("}}, 400, "invalid_value", "structured_outputs.regex", "unclosed group"),
    (
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 9_999_991}}},
        400, "invalid_value", "structured_outputs.json", "takes longer",
    ),
    ({"structured_outputs": {"regex": "a" * 40_000}}, 400, "invalid_value", "structured_outputs.regex", "32768"),
    ({"structured_outputs": {"choice": "a"}}, 400, "invalid_value", "structured_outputs.choice", "a list of texts"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, 400, "invalid_value", "ignore_eos", "leave it out"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        400, "invalid_value", "structured_outputs", "one of the two",
    ),
    ({"seed": 2**70}, 400, "invalid_value", "seed", ""),
    ({"n": 33}, 400, "invalid_value", "n", "32"),
    ({"n": 17, "prompt": ["a", "b"]}, 400, "invalid_value", "n", "34 choices"),
    ({"best_of": 1, "n": 2}, 400, "invalid_value", "best_of", "less than n=2"),
    ({"best_of": 17, "prompt": ["a", "b"]}, 400, "invalid_value", "best_of", "34 choices"),
    ({"logprobs": 21}, 400, "invalid_value", "logprobs", "20"),
    ({"logprobs": True}, 400, "invalid_value", "logprobs", "True"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400, "unsupported_parameter", "stream_options.include_obfuscation", "false",
    ),
    ({"logit_bias": {"300": 1}}, 400, "invalid_value", "logit_bias", "'300'"),
    ({"stop": ""}, 400, "invalid_value", "stop", "1 to"),
    ({"stop": ["a", ""]}, 400, "invalid_value", "stop", "1 to"),
    ({"stop": ["a"] * 17}, 400, "invalid_value", "stop", "16"),
    ({"stop": "x" * 300}, 400, "invalid_value", "stop", "300"),
    ({"stop": 5}, 400, "invalid_value", "stop", "5"),
    ({"prompt": ""}, 400, "empty_input", "prompt", "empty"),
    ({"prompt": []}, 400, "empty_input", "prompt", "empty"),
    ({"prompt": [""]}, 400, "empty_input", "prompt", "empty"),
    ({"prompt": ["a", ""]}, 400, "empty_input", "prompt", "prompt[1]"),
    ({"prompt": ["a", [1]], "n": 1, "max_tokens": 1, "wat": 1}, 400, "unknown_parameter", "wat", "wat"),
    ({"prompt": ["a", 5]}, 400, "invalid_value", "prompt", "prompt[1]"),
    ({"prompt": [[1], [400]]}, 400, "invalid_value", "prompt", "prompt[1][0] is 400"),
    ({"prompt": ["a"] * 33}, 400, "invalid_value", "prompt", "at most 32"),
    ({"prompt": [1, 400]}, 400, "invalid_value", "prompt", "prompt[1] is 400"),
    ({"prompt": [-1]}, 400, "invalid_value", "prompt", "prompt[0]"),
    ({"prompt": [1.5]}, 400, "invalid_value", "prompt", "prompt[0]"),
    ({"prompt": [True]}, 400, "invalid_value", "prompt", "prompt[0]"),
    ({"prompt": [1, "a"]}, 400, "invalid_value", "prompt", "prompt[1]"),
    ({"prompt": 5}, 400, "invalid_value", "prompt", "int"),
    ({"prompt": None}, 400, "invalid_value", "prompt", "NoneType"),
    ({"prompt": {"a": 1}}, 400, "invalid_value", "prompt", "dict"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "code", "param", "word"), BAD_COMPLETIONS)
def test_bad_completions_name_what_is_wrong(
    service: RunningService, body: dict[str, Any], status: int, code: str, param: str | None, word: str
) -> None:
    """Every unusable parameter is refused before the engine sees it, by name and with what was given."""
    answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "x", **body})
    check_problem(answer, status, code, param, word)


BAD_BODIES: list[tuple[bytes, int, str, str]] = [
    (b"{", 400, "invalid_json", "not JSON"),
    (b"", 400, "empty_input", "empty"),
    (b"[]", 400, "invalid_json", "object"),
    (b"null", 400, "invalid_json", "object"),
    (b"5", 400, "invalid_json", "object"),
    (b'{"prompt": "a"} x', 400, "invalid_json", "not JSON"),
    (b'{"prompt": "a\xff"}', 400, "invalid_utf8", "byte 13"),
    (b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400, "invalid_json", "recursion"),
    (b'{"prompt": ' + b"[" * 250 + b"]" * 250 + b"}", 400, "invalid_json", "recursion"),
    (b"{}", 400, "missing_parameter", ""),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "word"),
    [("/v1/completions", *bad) for bad in BAD_BODIES]
    + [(path, *BAD_BODIES[0]) for path in ("/v1/encodings", "/v1/embeddings", "/tokenize", "/detokenize")],
)
def test_bodies_that_are_not_the_json_wanted(
    service: RunningService, path: str, body: bytes, status: int, code: str, word: str
) -> None:
    """Broken JSON, other JSON, broken UTF-8 and endless nesting are refused; every JSON route reads bodies so."""
    answer = httpx.post(service.url + path, content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code and word in error["message"]


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_none_are_refused(service: RunningService, value: bytes) -> None:
    """NaN and infinity, which some JSON writers emit, are refused by name."""
    body = b'{"prompt": "a", "temperature": ' + value + b"}"
    answer = httpx.post(f"{service.url}/v1/completions", content=body, headers=JSON)
    check_problem(answer, 400, "invalid_value", "temperature")


def test_half_a_surrogate_is_refused(service: RunningService) -> None:
    """A JSON escape that is no character is a 400, not a crash."""
    routes = {"/v1/completions": "prompt", "/v1/encodings": "input", "/v1/embeddings": "input", "/tokenize": "prompt"}
    for path, key in routes.items():
        body = b'{"' + key.encode() + b'": "a\\ud800"}'
        answer = httpx.post(service.url + path, content=body, headers=JSON)
        assert answer.status_code == 400 and "error" in answer.json()


def test_json_has_a_size_limit(service: RunningService) -> None:
    """Over the limit the answer is 413, whether the length is declared or not."""
    big = json.dumps({"prompt": "x" * 200_000}).encode()
    declared = httpx.post(f"{service.url}/v1/completions", content=big, headers=JSON)
    check_problem(declared, 413, "body_too_large", None, "100000")
    chunked = httpx.post(f"{service.url}/v1/completions", content=iter([big[:70_000], big[70_000:]]), headers=JSON)
    check_problem(chunked, 413, "body_too_large", None, "100000")


def test_other_media_types_are_refused(service: RunningService) -> None:
    """A form, a compressed body or another charset gets an answer that says which header to send."""
    form = httpx.post(f"{service.url}/v1/completions", data={"prompt": "x"})
    check_problem(form, 415, "unsupported_media_type", None, "application/json")
    curl = {"Content-Type": "application/x-www-form-urlencoded"}
    check_problem(
        httpx.post(f"{service.url}/v1/encodings", content=b"abc", headers=curl),
        415, "unsupported_media_type", None, "text/plain",
    )  # fmt: skip
    packed = httpx.post(f"{service.url}/v1/encodings", content=b"abc", headers={"Content-Encoding": "br"})
    check_problem(packed, 415, "unsupported_media_type", None, "br is not offered")
    latin = httpx.post(
        f"{service.url}/v1/encodings", content=b"abc", headers={"Content-Type": "text/plain; charset=latin-1"}
    )
    check_problem(latin, 400, "unsupported_media_type", None, "latin-1")


BAD_OPTIONS: list[tuple[str, int, str, str]] = [
    ("window=0", 400, "invalid_value", "window"),
    ("window=-5", 400, "invalid_value", "window"),
    ("window=1.5", 400, "invalid_value", "window"),
    ("window=abc", 400, "invalid_value", "window"),
    ("window=5.0", 400, "invalid_value", "window"),
    ("window=%2B5", 400, "invalid_value", "window"),
    ("window=5_0", 400, "invalid_value", "window"),
    ("window=%205", 400, "invalid_value", "window"),
    ("window=%D9%A5", 400, "invalid_value", "window"),
    ("window=1000001", 400, "invalid_value", "window"),
    ("window=", 400, "invalid_value", "window"),
    ("window=5&window=6", 400, "invalid_value", "window"),
    ("granularity=page", 400, "invalid_value", "granularity"),
    ("pooling=max", 400, "invalid_value", "pooling"),
    ("format=xml", 400, "invalid_value", "format"),
    ("from_row=-1", 400, "invalid_value", "from_row"),
    ("from_row=1.0", 400, "invalid_value", "from_row"),
    ("windw=5", 400, "unknown_parameter", "windw"),
    ("model=nope", 404, "model_not_found", "model"),
]


@pytest.mark.parametrize(("query", "status", "code", "param"), BAD_OPTIONS)
def test_bad_encoding_options(service: RunningService, query: str, status: int, code: str, param: str) -> None:
    """Options of an encoding are refused by name, in the query as in JSON."""
    answer = httpx.post(f"{service.url}/v1/encodings?{query}", content=b"some text")
    check_problem(answer, status, code, param)
    if param == "granularity":
        assert "'sentence'" in answer.json()["detail"]
    if query.count("=") == 1 and not query.startswith("window="):
        name, value = query.split("=")
        check_problem(httpx.post(f"{service.url}/v1/encodings", json={"input": "a", name: value}), status, code, param)


def test_as_many_options_as_fit_in_a_head_cost_little() -> None:
    """Names in a query are looked up, not each compared with all others: everybody waits while one query is read."""
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [Name(f"{number:x}") for number in range(3000)]
    with pytest.raises(ServiceError, match="unknown parameter"):
        parse_query([(name, "") for name in names], EncodingOptions)
    assert compared < 10 * len(names)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": "a", **{f"k{n}": 1 for n in range(3000)}}, "k0"),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 3000}, "stop"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): "x" for n in range(3000)}}, "logit_bias"),
        (CompletionRequest, {"prompt": "a", "stream_options": {str(n): 1 for n in range(3000)}}, "stream_options"),
        (DetokenizeRequest, {"tokens": ["x"] * 3000}, "tokens"),
        (SearchRequest, {"query": "a", "documents": [{"text": "a"}, {str(n): 1 for n in range(3000)}]}, "documents"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{str(n): 1 for n in range(3000)}]}]},
            "messages",
        ),
    ],
)
def test_a_body_full_of_errors_is_refused_at_the_first(
    kind: type[BaseModel], body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation stops early, so that millions of wrong items do not keep everybody waiting while they are listed."""
    listed = []
    whole = parsing.refuse
    monkeypatch.setattr(parsing, "refuse", lambda errors, kind: listed.append(len(errors)) or whole(errors, kind))
    with pytest.raises(ServiceError) as refused:
        parsing.parse_json(json.dumps(body).encode(), kind)
    assert refused.value.param == param and len(refused.value.message) < 500
    assert sum(listed) <= 2


def test_options_that_contradict_are_refused(service: RunningService) -> None:
    """Query and JSON may both set an option only if they agree."""
    url = f"{service.url}/v1/encodings?window=5"
    check_problem(httpx.post(url, json={"input": "a", "window": 6}), 400, "invalid_value", "window", "5", "6")
    assert httpx.post(url, json={"input": "a", "window": 5}).status_code == 200
    check_problem(httpx.post(url, json={"input": ""}), 400, "empty_input", "input")


def test_unknown_routes_and_methods_are_problems_too(service: RunningService) -> None:
    """404 and 405 have the same shape as every other error."""
    check_problem(httpx.get(f"{service.url}/v1/nothing"), 404, "not_found", None, "/v1/nothing")
    check_problem(httpx.get(f"{service.url}/v1/models/"), 404, "model_not_found", "model", "''")
    wrong = httpx.get(f"{service.url}/v1/completions")
    check_problem(wrong, 405, "method_not_allowed", None, "POST")
    assert wrong.headers["allow"] == "POST"
    assert httpx.put(f"{service.url}/v1/uploads/x").headers["allow"] == "DELETE, GET, HEAD, PATCH"
    check_problem(httpx.get(f"{service.url}/v1/models/other"), 404, "model_not_found", "model")


def test_the_service_went_on(service: RunningService) -> None:
    """After all of this it still answers."""
    assert httpx.post(f"{service.url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert not [line for line in service.log_lines() if line.get("event") == "unexpected error"]
