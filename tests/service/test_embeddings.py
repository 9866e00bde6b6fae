"""POST /v1/embeddings over real sockets."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.support.fake_engine import HIDDEN, FakeEngine, row_vector
from tests.support.opening import is_encoding
from tests.support.raw_http import head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service"), embedding_inputs=50, embeddings_at_once=4) as running:
        yield running


def embed(service: RunningService, **body: Any) -> dict[str, Any]:
    """The answer to an embeddings request."""
    answer = httpx.post(service.url + ROUTE, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def wanted(text: bytes) -> np.ndarray:
    """The vector of a text under the byte tokeniser."""
    return row_vector(np.frombuffer(text, np.uint8).astype(np.int32), "mean")


@pytest.mark.parametrize("given", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_one_input_in_every_form(service: RunningService, given: Any) -> None:
    """Text, token ids, and lists of one of them give the same vector, in OpenAI's shape."""
    answer = embed(service, model="tiny", input=given)
    assert set(answer) == {"object", "model", "data", "usage"} and answer["object"] == "list"
    assert answer["data"][0]["object"] == "embedding" and answer["data"][0]["index"] == 0
    np.testing.assert_array_equal(np.float32(answer["data"][0]["embedding"]), wanted(b"abc"))
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_many_inputs_come_back_in_order(service: RunningService) -> None:
    """Each input is one document of the engine, few at a time, and has its place in the answer."""
    texts = [chr(97 + k % 26) * (1 + k * 7 % 30) for k in range(50)]
    service.engine.received.clear()
    answer = embed(service, input=texts)
    assert [item["index"] for item in answer["data"]] == list(range(50))
    for item, text in zip(answer["data"], texts, strict=True):
        np.testing.assert_array_equal(np.float32(item["embedding"]), wanted(text.encode()))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    opened = [m.rows for m in service.engine.received if is_encoding(m)]
    assert len(opened) == 50 and {(rows.granularity, rows.pooling) for rows in opened} == {("document", "mean")}


def test_base64_holds_little_endian_float32(service: RunningService) -> None:
    """The bytes are those of the numbers, for every input."""
    packed = embed(service, input=["abc", "z"], encoding_format="base64", dimensions=HIDDEN)
    for item, text in zip(packed["data"], (b"abc", b"z"), strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(item["embedding"]), "<f4"), wanted(text))


def test_the_official_client_reads_both_forms(service: RunningService) -> None:
    """The openai package, which asks for base64 by itself, gets the same numbers as with float."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="tiny", input=["abc", "de"])
        as_numbers = client.embeddings.create(model="tiny", input=["abc", "de"], encoding_format="float")
    for one, other in zip(by_default.data, as_numbers.data, strict=True):
        np.testing.assert_array_equal(np.float32(one.embedding), np.float32(other.embedding))
    assert by_default.usage.total_tokens == 5


def test_a_long_input_goes_by_credit(service: RunningService) -> None:
    """An input far over the engine's credit is one vector all the same."""
    text = "0123456789" * 20_000
    answer = embed(service, input=text)
    np.testing.assert_array_equal(np.float32(answer["data"][0]["embedding"]), wanted(text.encode()))


def test_shortened_vectors_have_length_one(service: RunningService) -> None:
    """`dimensions` leaves so many of the first numbers, scaled to length 1, through OpenAI's client too."""
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="-", max_retries=0)
    told = client.embeddings.create(model="tiny", input=["abc", "de"], dimensions=3)
    for item, text in zip(told.data, (b"abc", b"de"), strict=True):
        first = wanted(text)[:3]
        np.testing.assert_allclose(item.embedding, first / np.linalg.norm(first), rtol=1e-6)


def test_an_empty_text_costs_the_others_nothing(service: RunningService) -> None:
    """Among others it has a vector of zeros, which stays one when it is shortened."""
    answer = embed(service, input=["abc", "", "de"], dimensions=7)
    assert answer["data"][1]["embedding"] == [0.0] * 7
    assert np.linalg.norm(answer["data"][2]["embedding"]) == pytest.approx(1)
    assert answer["usage"]["prompt_tokens"] == 5


def test_shapes_of_other_servers(service: RunningService) -> None:
    """text-embeddings-inference's answer is a bare list of unit vectors, Cohere's has them by type."""

    def ask(path: str, **body: Any) -> Any:
        answer = httpx.post(service.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    vector = wanted(b"abc")
    unit = vector / np.linalg.norm(vector)
    np.testing.assert_allclose(ask("/embed", inputs=["abc"], truncate=True), [unit], rtol=1e-6)
    np.testing.assert_array_equal(np.float32(ask("/embed", inputs="abc", normalize=False)), [vector])
    np.testing.assert_array_equal(np.float32(ask("/embed", inputs="abc", normalize=False, dimensions=3)), [vector[:3]])
    info = httpx.get(f"{service.url}/info").json()
    assert info["model_id"] == "tiny" and info["max_client_batch_size"] == 50
    told = ask("/v2/embed", model="tiny", texts=["abc"], input_type="search_query", embedding_types=["float", "base64"])
    np.testing.assert_array_equal(np.float32(told["embeddings"]["float"]), [vector])
    assert base64.b64decode(told["embeddings"]["base64"][0]) == vector.astype("<f4").tobytes()
    assert told["meta"]["billed_units"] == {"input_tokens": 3} and told["texts"] == ["abc"]
    refused = httpx.post(f"{service.url}/v2/embed", json={"texts": ["a"], "embedding_types": ["int8"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "embedding_types"


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "word"),
    [
        ({}, 400, "missing_parameter", "input", "input"),
        ({"input": ""}, 400, "empty_input", "input", "empty"),
        ({"input": []}, 400, "empty_input", "input", "empty"),
        ({"input": [""]}, 400, "empty_input", "input", "input[0]"),
        ({"input": ["a", []]}, 400, "empty_input", "input", "input[1]"),
        ({"input": [1, 300]}, 400, "invalid_value", "input", "input[1] is 300"),
        ({"input": 5}, 400, "invalid_value", "input", "int"),
        ({"input": ["a"] * 51}, 400, "invalid_value", "input", "at most 50"),
        ({"input": "a", "dimensions": 9}, 400, "invalid_value", "dimensions", "has 8 numbers"),
        ({"input": "a", "dimensions": 0}, 400, "invalid_value", "dimensions", "0"),
        ({"input": "a", "encoding_format": "hex"}, 400, "invalid_value", "encoding_format", "'hex'"),
        ({"input": "a", "wat": 1}, 400, "unknown_parameter", "wat", "encoding_format"),
        ({"input": "a", "model": "ada"}, 404, "model_not_found", "model", "'ada'"),
    ],
)
def test_what_is_refused(
    service: RunningService, body: dict[str, Any], status: int, code: str, param: str, word: str
) -> None:
    """Every unusable parameter is refused by name, with what was given or needed."""
    answer = httpx.post(service.url + ROUTE, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert word in error["message"]


def test_an_engine_that_fails_is_a_5xx(tmp_path: Path) -> None:
    """One input that fails ends the request, and what the others hold in the engine is cancelled."""
    engine = FakeEngine(fail_at=5)
    with running_service(tmp_path, engine) as service:
        answer = httpx.post(service.url + ROUTE, json={"input": ["a", "abcdef", "b"]})
        assert answer.status_code == 500 and "rank 1 died" in answer.text
        eventually(lambda: engine.open_count == 0, "the others to be cancelled")
        engine.fail_at, engine.hidden_size = None, HIDDEN
        assert httpx.post(service.url + ROUTE, json={"input": "a"}).status_code == 200


def test_a_client_that_leaves_cancels_its_inputs(tmp_path: Path) -> None:
    """When the connection closes, nothing of the request is left in the engine."""
    engine = FakeEngine(paused=True)
    with running_service(tmp_path, engine) as service:
        body = json.dumps({"input": ["abc"] * 20}).encode()
        with service.connect() as connection:
            headers = ("Content-Type: application/json", "x-request-id: gone", f"Content-Length: {len(body)}")
            connection.sendall(head(ROUTE, *headers) + body)
            eventually(lambda: len(service.engine_port.waiting) >= 20, "the inputs to be sent")
        eventually(lambda: len(engine.cancelled) == 20, "the cancels")
        assert service.logged("gone")["reason"] == "client_gone"
        service.engine_port.resume()
