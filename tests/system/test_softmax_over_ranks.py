"""A model of exact attention over four ranks, by torchrun and over HTTP: the rows and the text of one rank."""

import json
import subprocess
import sys
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
from tests.support.served import ROOT, served
from tests.support.tokenisers import PROSE

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


def test_torchrun(model: Path, rows: torch.Tensor, tmp_path: Path) -> None:
    """Four processes under torchrun write the rows of one rank."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "-m", "dist_attn", "encode"]
    command += [str(tmp_path / "text.txt"), f"--out={tmp_path / 'rows.npy'}", f"--model={model}", f"--window={WINDOW}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["ranks"], report["tokens"], report["rows"]) == (RANKS, len(TEXT), len(rows))
    assert_close(torch.from_numpy(np.load(tmp_path / "rows.npy")), rows)


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
