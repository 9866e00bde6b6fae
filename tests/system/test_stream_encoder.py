"""A stream encoder behind the whole program, on two ranks, one of which is killed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_stream_encoder, load_text_encoder, save_model
from dist_attn.commands import cli
from dist_attn.conversion import begin_stream_encoder, convert_folder
from dist_attn.models import ContextConfig
from dist_attn.text import load_tokeniser
from tests.support.sentence_encoders import TEXTS, write_sentence_encoder
from tests.support.served import Served, served
from tests.support.source_path import SOURCE_PATH

BOOK = " ".join(TEXTS) * 60
CONTEXT = {"num_layers": 1, "mlp_size": 40, "mixer": {"kind": "gated_delta", "hidden_size": 32, "num_heads": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose context layers have learned something."""
    folder = tmp_path_factory.mktemp("encoder")
    write_sentence_encoder(folder / "theirs")
    convert_folder(folder / "theirs", folder / "minilm")
    model = begin_stream_encoder(load_text_encoder(folder / "minilm"), 32, ContextConfig.model_validate(CONTEXT))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.context.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder / "stream", tokeniser=load_tokeniser(folder / "minilm"))
    return folder / "stream"


@pytest.fixture(scope="module")
def program(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The program on two ranks, in the precision that hidden states are compared in."""
    place = tmp_path_factory.mktemp("served")
    with served(place, "--dtype=float32", ranks=2, model=folder) as it:
        yield it


def hidden_of(folder: Path, text: str) -> np.ndarray:
    """The hidden states of the text's tokens, by the model alone."""
    tokens_L = torch.from_numpy(load_tokeniser(folder).encode(text.encode()).astype(np.int64))
    with torch.inference_mode():
        return load_stream_encoder(folder).encode(tokens_L[None])[0].numpy()


def encode(program: Served, body: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The rows of a text, 100 tokens each, and the summary."""
    answer = httpx.post(
        f"{program.url}/v1/encodings?window=100", content=body, headers={"content-type": "text/plain"}, timeout=120
    )
    *rows, summary = [json.loads(line) for line in answer.text.splitlines()]
    return np.array([row["embedding"] for row in rows], dtype=np.float32), summary


def test_rows_are_means_of_hidden_states_whatever_happens_to_a_rank(program: Served, folder: Path) -> None:
    """Also where a rank is killed while half of the text has been sent."""
    hidden_LD = hidden_of(folder, BOOK)
    rows, summary = encode(program, BOOK.encode())
    assert summary["tokens"] == len(hidden_LD)
    want = [hidden_LD[at : at + 100].mean(0) for at in range(0, len(hidden_LD), 100)]
    np.testing.assert_allclose(rows, np.stack(want), atol=1e-5, rtol=1e-4)

    def half_and_half() -> Iterator[bytes]:
        yield BOOK[: len(BOOK) // 2].encode()
        program.parts()["rank 1"].kill()
        yield BOOK[len(BOOK) // 2 :].encode()

    np.testing.assert_array_equal(encode(program, half_and_half())[0], rows)


def test_a_job_has_the_rows_of_an_encoding(program: Served) -> None:
    """Windows too, between which a job of a language model keeps states."""
    job = httpx.post(f"{program.url}/v1/jobs", json={"input": BOOK, "window": 100}, timeout=120)
    answer = httpx.get(f"{program.url}{job.headers['location']}/result", timeout=120)
    *rows, summary = [json.loads(line) for line in answer.text.splitlines()]
    want, _ = encode(program, BOOK.encode())
    assert summary["rows"] == len(want)
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], dtype=np.float32), want)


def test_embeddings_have_length_one_and_any_length_of_text(program: Served, folder: Path) -> None:
    """The mean over the whole text, made a unit vector as the sentence encoder's are; no frame is counted."""
    texts = ["It was the best of times.", BOOK]
    answer = httpx.post(f"{program.url}/v1/embeddings", json={"input": texts}, timeout=120).json()
    hidden = [hidden_of(folder, text) for text in texts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, hidden))
    for item, hidden_LD in zip(answer["data"], hidden, strict=True):
        mean_D = hidden_LD.mean(0)
        np.testing.assert_allclose(item["embedding"], mean_D / np.linalg.norm(mean_D), atol=1e-5, rtol=1e-4)
    told = httpx.post(f"{program.url}/tokenize", json={"prompt": texts[0]}).json()
    assert told["count"] == len(hidden[0])


def test_the_example_finds_what_a_search_finds(program: Served, tmp_path: Path) -> None:
    """A question is compared with rows as a row: less their mean, a vector of length 1 would point elsewhere."""
    (tmp_path / "book.txt").write_text(BOOK)
    question, script = TEXTS[0], Path(__file__).parents[2] / "examples/search_in_a_book.py"
    command = [sys.executable, script, tmp_path / "book.txt", question, "--window", "50", "--url", program.url]
    environment = os.environ | {"PYTHONPATH": SOURCE_PATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    body = {"query": question, "documents": [{"text": BOOK}], "mode": "dense", "window": 50, "top_k": 5}
    found = httpx.post(f"{program.url}/v1/search", json=body, timeout=120).json()["results"]
    told = re.findall(r"^ *(\S+)  passage (\d+)", done.stdout, re.M)
    assert told == [(f"{one['score']:.3f}", str(one["index"])) for one in found]


def test_it_writes_nothing(program: Served) -> None:
    """The card says what it does; completions and sessions are refused in words."""
    card = httpx.get(f"{program.url}/v1/models/stream").json()
    assert (card["capabilities"], card["max_model_len"]) == (["embeddings", "encodings", "search", "rerank"], None)
    for route, body in (("completions", {"prompt": "It was", "max_tokens": 3}), ("sessions", {})):
        answer = httpx.post(f"{program.url}/v1/{route}", json=body)
        assert answer.status_code == 400, answer.text
        assert "makes vectors of texts and writes none" in answer.json()["error"]["message"]


def test_the_command_gives_the_same_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist-attn encode` in one process, without a server."""
    (tmp_path / "text").write_text(BOOK)
    monkeypatch.setattr(
        "sys.argv",
        [
            "dist-attn",
            "encode",
            f"{tmp_path / 'text'}",
            "--out",
            f"{tmp_path / 'rows.npy'}",
            "--model",
            f"{folder}",
            "--dtype",
            "float32",
        ],
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    hidden_LD = hidden_of(folder, BOOK)
    want = np.stack([hidden_LD[at : at + 512].mean(0) for at in range(0, len(hidden_LD), 512)])
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), want, atol=1e-5, rtol=1e-4)
