"""The routes in front of a text encoder: what is framed, cut, counted and refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dist_attn_service.engine.served_model import ServedModel

from dist_attn.errors import ModelFolderError
from dist_attn.text import WordPieceTokeniser
from dist_attn.wire.messages import RowSpec
from tests.support.fake_engine import HIDDEN, VOCAB, row_vector
from tests.support.opening import is_encoding
from tests.support.sentence_encoders import word_piece_contents
from tests.support.service_server import RunningService, running_service

TEXT_TOKENS = 10
ENCODER: dict[str, Any] = {
    "kind": "text_encoder",
    "vocab_size": VOCAB,
    "encoder": {"hidden_size": HIDDEN},
    "max_tokens": TEXT_TOKENS + 2,
    "prefix": [2],
    "suffix": [3],
    "pooling": "first",
}


def tokeniser() -> WordPieceTokeniser:
    """A small WordPiece."""
    return WordPieceTokeniser(json.loads(word_piece_contents()), None)


def write_folder(folder: Path, **changes: Any) -> Path:
    """A folder as far as the service reads it."""
    folder.mkdir()
    tokeniser().save(folder)
    (folder / "config.json").write_text(json.dumps(ENCODER | changes))
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The service with a text encoder, before an engine that is none."""
    folder = tmp_path_factory.mktemp("encoder")
    with running_service(folder, model=write_folder(folder / "minilm")) as running:
        yield running


def post(service: RunningService, route: str, **body: Any) -> httpx.Response:
    """The answer to a request."""
    return httpx.post(service.url + route, json=body, timeout=60)


def test_inputs_are_cut_and_counted(service: RunningService) -> None:
    """Texts and token ids are cut where the model stops reading; what it puts around each is counted, not sent."""
    long, short = "the age of wisdom " * 1000, "it was"
    service.engine.received.clear()
    answer = post(service, "/v1/embeddings", input=[long, short]).json()
    for item, text in zip(answer["data"], (long, short), strict=True):
        want = row_vector(tokeniser().encode(text.encode())[:TEXT_TOKENS], "model")
        np.testing.assert_array_equal(np.float32(item["embedding"]), want)
    assert answer["usage"]["prompt_tokens"] == TEXT_TOKENS + 2 + len(tokeniser().encode(short.encode())) + 2
    opened = [message.rows for message in service.engine.received if is_encoding(message)]
    assert opened == [RowSpec("document", pooling="model")] * 2
    ids = post(service, "/v1/embeddings", input=[[7] * 50]).json()
    np.testing.assert_array_equal(
        np.float32(ids["data"][0]["embedding"]), row_vector(np.full(10, 7, np.int32), "model")
    )


def test_blanks_have_no_direction(service: RunningService) -> None:
    """A text without any token is refused like an empty one where it is alone, and has zeros among others."""
    answer = post(service, "/v1/embeddings", input=[" \t "])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "empty_input"
    assert "input[0] has no tokens" in answer.json()["error"]["message"]
    rows = post(service, "/v1/embeddings", input=["x", " \t "]).json()["data"]
    assert any(rows[0]["embedding"]) and not any(rows[1]["embedding"])


@pytest.mark.parametrize(
    ("query", "window"), [("", TEXT_TOKENS), ("?window=4", 4), ("?granularity=token", TEXT_TOKENS)]
)
def test_windows_fit_the_model(service: RunningService, query: str, window: int) -> None:
    """Windows are as long as the model reads unless a shorter one is asked for; ranges of bytes hold their words."""
    text = "  It was the best of times,  it was the worst of times; "
    service.engine.received.clear()
    answer = httpx.post(f"{service.url}/v1/encodings{query}", content=text, headers={"content-type": "text/plain"})
    *rows, summary = [json.loads(line) for line in answer.text.splitlines()]
    (opened,) = [message.rows for message in service.engine.received if is_encoding(message)]
    assert (opened.window, opened.pooling) == (window, "model")
    tokens = tokeniser().encode(text.encode()).tolist()
    assert summary["tokens"] == len(tokens)
    for row in rows:
        part = text.encode()[row["byte_start"] : row["byte_stop"]]
        if query != "?granularity=token":  # a token alone may be the middle of a word
            assert tokeniser().encode(part).tolist() == tokens[row["start"] : row["stop"]]
    assert rows[-1]["byte_stop"] == len(text.rstrip())


@pytest.mark.parametrize(
    ("query", "param", "message"),
    [
        ("granularity=document", "granularity", "reads 10 tokens at once: take window"),
        ("window=11", "window", "window=11 is over the 10 tokens"),
        ("pooling=mean", "pooling", "this model pools by its first token; leave it out"),
    ],
)
def test_rows_that_it_does_not_give(service: RunningService, query: str, param: str, message: str) -> None:
    """Rows that would need a longer sequence or another pooling are refused by the option that asks for them."""
    answer = httpx.post(f"{service.url}/v1/encodings?{query}", content="x", headers={"content-type": "text/plain"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert message in error["message"]


def test_completions_are_refused_and_models_say_why(service: RunningService) -> None:
    """A model that cannot write says so before the engine hears of it, and /v1/models lists what it can do."""
    answer = post(service, "/v1/completions", prompt="x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    card = httpx.get(f"{service.url}/v1/models").json()["data"][0]
    assert (card["capabilities"], card["max_model_len"]) == (
        ["embeddings", "encodings", "search", "rerank"],
        TEXT_TOKENS + 2,
    )
    told = post(service, "/tokenize", prompt="it was").json()
    assert told["max_model_len"] == TEXT_TOKENS + 2


@pytest.mark.parametrize("kind", ["text_classifier", "masked_autoencoder", "encoder_decoder", "million"])
def test_other_kinds_are_not_served(tmp_path: Path, kind: str) -> None:
    """The folder of a classifier, an auto-encoder or a translator, with a tokeniser or without, is refused by name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"kind": kind, "vocab_size": 9, "hidden_size": 8}))
    with pytest.raises(ModelFolderError, match=f"holds a {kind}; served are language models and text encoders"):
        ServedModel.read(tmp_path / "model")


def test_an_encoder_without_its_sizes_is_refused(tmp_path: Path) -> None:
    """A config.json that does not say how much the model reads is named."""
    with pytest.raises(ModelFolderError, match="is not a model's configuration"):
        ServedModel.read(write_folder(tmp_path / "b", max_tokens="all"))
