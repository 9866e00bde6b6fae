"""A model of exact attention over four ranks, over HTTP: the rows and the text of one rank."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.generation import generate
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import SamplingSpec
from tests.support.closeness import assert_close
from tests.support.models import write_small_folder
from tests.support.served import served
from tests.support.sessions import SessionClient
from tests.support.tokenisers import PROSE
from tests.support.waiting import eventually

RANKS, WINDOW, SECONDS = 4, 300, 60.0
TEXT = (9 * PROSE.encode())[:17_003]  # three blocks of four ranks, and the end is on no grid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model of exact attention."""
    return write_small_folder(tmp_path_factory.mktemp("softmax") / "tiny", kind="softmax")


@pytest.fixture(scope="module")
def rows(model: Path) -> torch.Tensor:
    """Means over windows of the hidden states that one rank computes in one go."""
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.inference_mode():
        hidden_LD = load_model(model).encode(tokens[None])[0]
    return torch.stack([window.mean(0) for window in hidden_LD.split(WINDOW)])


def test_http(model: Path, rows: torch.Tensor, tmp_path: Path) -> None:
    """A service with four ranks answers with the rows of one rank, and completes a prompt as one rank does."""
    with served(tmp_path, ranks=RANKS, model=model) as running:
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


def test_sessions_outlive_a_rank(tmp_path: Path) -> None:
    """What a session and its fork over two ranks draw after one was killed is what a completion of the whole draws."""
    mixed = write_small_folder(tmp_path / "mixed", kind="hybrid")
    text = TEXT[:5000]
    body = {"prompt": text.decode(), "max_tokens": 12, "temperature": 0, "logit_bias": {"256": -100}}
    with served(tmp_path, ranks=2, model=mixed) as running:
        client = SessionClient(running.url, seconds=SECONDS)
        whole, *again = [client.post("/v1/completions", json=body).json()]

        def taken_from_a_state() -> bool:
            again.append(client.post("/v1/completions", json=body).json())
            return bool(again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4096)

        # It is stored behind the answer, whenever a busy machine gets there.
        eventually(taken_from_a_state, "the prompt's state to be stored")
        session = client.make()
        assert client.append(session, text[:3000]).position == 3000
        running.parts()["rank 1"].kill()
        last = client.append(session, text[3000:])
        fork = client.post(f"/v1/sessions/{session}/fork").json()["id"]
        drawn = {key: body[key] for key in ("max_tokens", "temperature", "logit_bias")}
        said = [client.post(f"/v1/sessions/{one}/generate", json=drawn).json() for one in (session, fork)]
    assert (last.recomputed_tokens, last.bit_exact, last.position) == (0, True, len(text))
    assert {answer["choices"][0]["text"] for answer in (*again, *said)} == {whole["choices"][0]["text"]}
