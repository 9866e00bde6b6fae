"""A folder of transformers as it was downloaded, served over two ranks that hold half of its layers each."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dist_attn.generation.text import generate_text
from dist_attn.text import read_foreign
from dist_attn.wire.messages import SamplingSpec
from tests.support.downloaded import qwen3_next, save
from tests.support.served import served
from tests.support.sessions import SessionClient
from tests.support.tokenisers import PROSE, foreign_contents

transformers = pytest.importorskip("transformers", reason="the folder is written by transformers")

TEXT = (3 * PROSE)[:4500]
PARTS = TEXT[:2600].encode(), TEXT[2600:].encode()
UNUSED = 380  # a token of the model that the tokeniser does not have
DRAWN, LONG, SECONDS = 24, 200, 120.0
SAMPLED = {"max_tokens": DRAWN, "seed": 5, "temperature": 1, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear and softmax layers, more tokens than the tokeniser has, and two tokens that end a text."""
    model = qwen3_next(vocab_size=384)
    with torch.no_grad():  # so large that what follows depends on the text
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    path = save(model, tmp_path_factory.mktemp("downloaded") / "qwen3-next")
    (path / "tokenizer.json").write_text(foreign_contents())
    endless = _generated(path, eos_token_id=None)
    end = next(token for token in reversed(endless[:16]) if token not in endless[:8])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [UNUSED, end], "do_sample": False}))
    return path


def _generated(folder: Path, **options: Any) -> list[int]:
    """What transformers' own `generate` draws after the text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.from_numpy(read_foreign(folder).encode_whole(TEXT.encode(), framed=True)).long()
    tokens: list[int] = model.generate(prompt[None], max_new_tokens=DRAWN, **options)[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def wanted(folder: Path) -> str:
    """The text of transformers' generate, which is that of one process too."""
    *tokens, end = _generated(folder)
    text = read_foreign(folder).padded(384).decode(tokens).decode(errors="replace")
    assert end != UNUSED and 8 <= len(tokens) < 16
    assert generate_text(str(folder), TEXT.encode(), SamplingSpec(DRAWN, temperature=0.0))["text"] == text
    return text


def test_texts_and_sessions_outlive_a_rank(folder: Path, wanted: str, tmp_path: Path) -> None:
    """Texts are those of transformers' generate; the loss of a rank and forks change no bit of what follows."""
    with served(tmp_path, "--weights-over-ranks", ranks=2, model=folder) as running:
        client = SessionClient(running.url, seconds=SECONDS)
        whole = _completed(client, {"max_tokens": DRAWN})
        assert (whole["text"], whole["finish_reason"]) == (wanted, "stop")
        padded = _completed(client, {"max_tokens": 3, "logit_bias": {UNUSED: 100}, "ignore_eos": True, "logprobs": 1})
        assert (padded["text"], padded["logprobs"]["tokens"]) == ("", [""] * 3)
        form = {"structured_outputs": {"regex": "[a-d]{3,9}é"}, "temperature": 1, "seed": 3}
        formed = _completed(client, {"max_tokens": 40, **form})
        assert re.fullmatch("[a-d]{3,9}é", formed["text"]) and formed["finish_reason"] == "stop"

        undisturbed, session = client.make(), client.make()
        for part in PARTS:
            client.append(undisturbed, part)
        reference = _continued(client, undisturbed)
        client.append(session, PARTS[0])
        body = {"prompt": TEXT, "max_tokens": LONG, "seed": 5, "temperature": 1, "ignore_eos": True}
        again = _completed(client, body)["text"]
        assert _streamed(client, body, running.parts()["rank 2"].kill) == again
        last = client.append(session, PARTS[1])
        assert (last.recomputed_tokens, last.bit_exact) == (0, True)
        fork = client.post(f"/v1/sessions/{session}/fork").json()["id"]
        assert [_continued(client, one) for one in (session, fork)] == [reference] * 2


def _completed(client: SessionClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": TEXT} | body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def _continued(client: SessionClient, session: str) -> tuple[str, list[float]]:
    """A text that is drawn after a session's, and the log-probabilities of its tokens."""
    answer = client.post(f"/v1/sessions/{session}/generate", json=SAMPLED)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def _streamed(client: SessionClient, body: dict[str, Any], disturb: Any) -> str:
    """The text of a completion, which is disturbed when the first of it is here."""
    parts: list[str] = []
    url = f"{client.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=SECONDS) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not parts:
                disturb()
            parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
    return "".join(parts)
