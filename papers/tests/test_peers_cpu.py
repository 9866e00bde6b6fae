"""The comparison with llama.cpp is of the same models: it gives our logits and our greedy tokens."""

from pathlib import Path

import pytest
import torch

from benchmarks.peers import absent
from dist_attn_papers.studies import peers_cpu, peers_cpu_long
from dist_attn_papers.studies.gguf_models import write_gguf
from dist_attn_papers.studies.llama_cpp import LlamaCpp
from dist_attn_papers.studies.peers_cpu import PEERS, TINY, adapted, random_model

MISSING = absent(*PEERS)
needs_llama_cpp = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
PROMPT, TOKENS = (7, 91, 3, 200, 15, 15, 66, 128, 9, 30, 251, 4), 12


@needs_llama_cpp
@pytest.mark.parametrize("kind", TINY)
def test_llama_cpp_scores_and_writes_what_we_do(kind: str, tmp_path: Path) -> None:
    """In float32 both give every token the same log probability after a prompt, and write the same greedy tokens."""
    model = random_model(kind, TINY[kind])
    write_gguf(model, tmp_path / "model.gguf", "float32")
    theirs = LlamaCpp(tmp_path / "model.gguf", slots=1, tokens=256, threads=1, exact=True)
    ours = adapted(model)
    with torch.inference_mode():
        logits_1LV, state = ours(torch.tensor([PROMPT]))
        expected_V = logits_1LV[0, -1].log_softmax(-1)
        written = [int(expected_V.argmax())]
        for _ in range(TOKENS - 1):
            logits_1V, state = ours.step(torch.tensor(written[-1:]), state)
            written.append(int(logits_1V.argmax()))
    found_V = torch.tensor(theirs.log_probabilities(PROMPT, ours.vocab_size))
    torch.testing.assert_close(found_V, expected_V, atol=1e-4, rtol=0.0)
    assert theirs.greedy(PROMPT, TOKENS) == written


@needs_llama_cpp
def test_the_study_runs() -> None:
    """Its smallest sizes give a ratio for every shape and work, and one of two ranks."""
    found = peers_cpu.measure(smoke=True)
    assert len(found.ratios) == 4 * len(TINY) and all(ratio > 0 for ratio in found.ratios.values())


@needs_llama_cpp
def test_the_study_of_long_prompts_runs() -> None:
    """It gives a ratio for every shape."""
    found = peers_cpu_long.measure(smoke=True)
    assert len(found.ratios) == len(TINY) and all(ratio > 0 for ratio in found.ratios.values())
