"""A converted sentence encoder behind the whole program: sentence-transformers' vectors, on two ranks."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dist_attn.conversion import convert_folder
from tests.support.sentence_encoders import MAX_TOKENS, TEXTS, sentence_transformer, write_sentence_encoder
from tests.support.served import Served, served
from tests.support.waiting import eventually

BOOK = " ".join(TEXTS) * 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the encoder as sentence-transformers has it (theirs), and as ours."""
    folder = tmp_path_factory.mktemp("encoder")
    write_sentence_encoder(folder / "theirs")
    convert_folder(folder / "theirs", folder / "minilm")
    return folder


@pytest.fixture(scope="module")
def program(folders: Path) -> Iterator[Served]:
    """The program on two ranks."""
    with served(folders, ranks=2, model=folders / "minilm") as it:
        yield it


def post(program: Served, route: str, **body: Any) -> httpx.Response:
    """The answer to a request."""
    return httpx.post(program.url + route, json=body, timeout=60)


def test_embeddings_are_those_of_sentence_transformers(program: Served, folders: Path) -> None:
    """A batch of texts gives the vectors of `model.encode` to 1e-5, as numbers and as bytes, and counts its tokens."""
    library, texts = sentence_transformer(folders / "theirs"), list(TEXTS) * 5
    want = library.encode(texts)
    answer = post(program, "/v1/embeddings", input=texts).json()
    got = np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
    counts = [len(library.tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"]) for text in texts]
    assert answer["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    packed = post(program, "/v1/embeddings", input=texts, encoding_format="base64", dimensions=32).json()["data"]
    again = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in packed])
    # Texts are read together with others, on which the last bits depend.
    np.testing.assert_allclose(again, got, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [MAX_TOKENS - 2, 5])
def test_windows_of_a_book_are_embeddings(program: Served, window: int) -> None:
    """Every window of a long text has the vector that /v1/embeddings gives its tokens, and its place in the bytes."""
    answer = httpx.post(
        f"{program.url}/v1/encodings?window={window}", content=BOOK.encode(), headers={"content-type": "text/plain"}
    )
    *rows, summary = [json.loads(line) for line in answer.text.splitlines()]
    tokens = post(program, "/tokenize", prompt=BOOK).json()["tokens"]
    assert summary["tokens"] == len(tokens) and summary["rows"] == len(rows) == -(-len(tokens) // window)
    assert [(row["start"], row["stop"]) for row in rows[:2]] == [(0, window), (window, 2 * window)]
    some = [*rows[::25], rows[-1]]
    embedded = post(program, "/v1/embeddings", input=[tokens[row["start"] : row["stop"]] for row in some]).json()[
        "data"
    ]
    for row, item in zip(some, embedded, strict=True):
        np.testing.assert_allclose(row["embedding"], item["embedding"], atol=1e-5, rtol=0)
    text = BOOK.encode()
    # By itself half a word is spelt otherwise; a word's bytes begin with the blank before it.
    whole = [row for row in rows if not row["byte_start"] or text[row["byte_start"]] == ord(" ")]
    assert len(whole) > len(rows) / 10
    for row in whole[:20]:
        part = text[row["byte_start"] : row["byte_stop"]].decode()
        assert post(program, "/tokenize", prompt=part).json()["tokens"] == tokens[row["start"] : row["stop"]]


def test_a_book_is_searched_by_its_sentences(program: Served) -> None:
    """A sentence of a text that a job has encoded is found first by its words and by its vector, which is its own; and
    documents are put in order.
    """
    said = ["The worst of times.", "I know wisdom.", "It was the age of foolishness!"]
    made = post(program, "/v1/jobs", input=" ".join(said), granularity="sentence").json()
    place = f"{program.url}/v1/jobs/{made['id']}"
    eventually(lambda: httpx.get(place).json()["status"] == "succeeded", "the job to end", 60)
    reads, whole = MAX_TOKENS - 2, 0
    for number, sentence in enumerate(said):
        asked = {"query": sentence, "documents": [{"id": "book", "job_id": made["id"]}]}
        found = post(program, "/v1/search", **asked).json()
        assert found["documents"] == [{"id": "book", "rows": len(said), "complete": True}]
        row = next(one for one in found["results"] if one["index"] == number)
        assert row["text"].strip() == sentence and row["parts"]["lexical"]["rank"] == 1
        if row["start"] // reads == (row["stop"] - 1) // reads:  # it was read as one sequence
            assert found["results"][0] == row and row["parts"]["dense"]["score"] == pytest.approx(1, abs=1e-4)
            whole += 1
        ordered = post(program, "/v1/rerank", query=sentence, documents=said).json()["results"]
        assert ordered[0]["index"] == number and ordered[0]["relevance_score"] == pytest.approx(1, abs=1e-5)
    assert whole


def test_what_it_cannot_do_is_refused(program: Served) -> None:
    """The list of models says what it does, and the rest is refused with a reason, the program still running."""
    card = httpx.get(f"{program.url}/v1/models/minilm").json()
    assert (card["capabilities"], card["max_model_len"], card["embedding_size"]) == (
        ["embeddings", "encodings", "search", "rerank"],
        MAX_TOKENS,
        32,
    )
    answer = post(program, "/v1/completions", prompt="It was", max_tokens=3)
    assert answer.status_code == 400
    assert "makes vectors of texts and writes none" in answer.json()["error"]["message"]
    assert program.status()["model"] == "minilm"
