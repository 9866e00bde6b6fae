"""POST /tokenize and /detokenize over real sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dist_attn.text import ByteLevelTokeniser
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.tokenisers import FAILS_AT, failing_contents
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service with the byte tokeniser."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def ask(service: RunningService, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request that works."""
    answer = httpx.post(service.url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_a_text_and_its_tokens(service: RunningService) -> None:
    """The answer has vLLM's keys; token strings come when they are asked for."""
    plain = ask(service, "/tokenize", model="tiny", prompt="aé", add_special_tokens=False)
    assert plain == {"count": 3, "max_model_len": 1 << 52, "tokens": [97, 195, 169], "token_strs": None}
    told = ask(service, "/tokenize", prompt="aé", return_token_strs=True)
    assert told["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert ask(service, "/tokenize", prompt="")["tokens"] == []


def test_texts_of_another_server(service: RunningService) -> None:
    """With `inputs` the answer is text-embeddings-inference's: the tokens of each text, by themselves."""
    (told,) = httpx.post(f"{service.url}/tokenize", json={"inputs": "aé"}).json()
    assert told[0] == {"id": 97, "text": "a", "special": False} and len(told) == 3
    several = httpx.post(f"{service.url}/tokenize", json={"inputs": ["ab", ""]}).json()
    assert [len(one) for one in several] == [2, 0]


@pytest.mark.parametrize("text", ["", "naïve — 😀", "x" * 200_000])
def test_detokenize_undoes_tokenize(service: RunningService, text: str) -> None:
    """Tokens and back is the text, of any length."""
    tokens = ask(service, "/tokenize", prompt=text)["tokens"]
    assert ask(service, "/detokenize", tokens=tokens)["prompt"] == text


def test_bytes_that_are_no_text_are_marked(service: RunningService) -> None:
    """Half a character becomes U+FFFD, and the end token stands for nothing."""
    assert ask(service, "/detokenize", tokens=[97, 195, 256, 98])["prompt"] == "a\ufffdb"


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "missing_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "inputs": "a"}, "invalid_value", "inputs"),
        ("/tokenize", {"inputs": []}, "invalid_value", "inputs"),
        ("/tokenize", {"inputs": [""] * 2049}, "invalid_value", "inputs"),
        ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "unknown_parameter", "messages"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model_not_found", "model"),
        ("/detokenize", {"tokens": [257]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": "a"}, "invalid_value", "tokens"),
    ],
)
def test_what_is_refused(service: RunningService, path: str, body: dict[str, Any], code: str, param: str) -> None:
    """Every unusable parameter is refused by name."""
    answer = httpx.post(service.url + path, json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["code"], error["param"]) == (code, param), error


def test_a_text_at_which_the_models_tokeniser_fails(tmp_path: Path) -> None:
    """At each door its request is refused in words that name the model, the log says why, and others are answered."""
    model = model_folder(tmp_path, ByteLevelTokeniser(failing_contents(), None))
    with running_service(tmp_path, model=model) as service:
        for path, body in (
            ("/tokenize", {"prompt": FAILS_AT}),
            ("/v1/completions", {"prompt": FAILS_AT}),
            ("/v1/embeddings", {"input": FAILS_AT}),
            ("/v1/search", {"query": "b", "documents": [FAILS_AT]}),
        ):
            answer = httpx.post(service.url + path, json=body, timeout=60)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["code"] == "invalid_value" and "model 'tiny' fails at this text" in error["message"], error
            assert str(tmp_path) not in answer.text
        stream = httpx.post(f"{service.url}/v1/encodings", content=FAILS_AT, headers={"content-type": "text/plain"})
        assert "model 'tiny' fails at this text" in stream.text.splitlines()[-1]
        eventually(lambda: sum("retry-limit" in line.get("error", "") for line in service.log_lines()) == 5, "the log")
        assert ask(service, "/tokenize", prompt="xyz")["count"]
