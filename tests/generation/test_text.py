"""Generated text: what is streamed is what is reported, and unusable prompts are refused before anything is loaded."""

from pathlib import Path

import pytest
import torch

from dist_attn.checkpoints import load_model_and_tokeniser, save_model
from dist_attn.errors import InputError, ModelFolderError
from dist_attn.generation import generate
from dist_attn.generation.text import generate_text
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import SamplingSpec
from tests.support.models import small_model, write_small_folder

PROMPT = "Ein Käse — ".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_the_streamed_text_is_the_reported_one(folder):
    """The pieces put together are the text, which is what the drawn tokens spell with broken characters replaced."""
    spec, pieces = SamplingSpec(max_tokens=60, temperature=1.5, seed=3), []
    report = generate_text(str(folder), PROMPT, spec, on_text=pieces.append)
    model, tokeniser = load_model_and_tokeniser(folder)
    drawn = generate(model, tokeniser.encode(PROMPT), spec, end_tokens=[tokeniser.end_token])
    assert report["text"] == "".join(pieces) == tokeniser.decode(drawn).decode(errors="replace")
    assert len(pieces) > 1
    assert all(pieces)
    assert (report["tokens"], report["model"]) == (len(drawn), "tiny")
    assert report["seconds"] >= 0


def test_the_reason_of_the_end_is_told(tmp_path):
    """A text that uses all its tokens ends by "length"; one whose model draws the end token stops by itself."""
    model, tokeniser = small_model(), ByteTokeniser()
    with torch.no_grad():
        # The norm's bias points along the end token's row, which wins over everything else.
        model.norm.weight.zero_()
        model.norm.bias.copy_(model.embedding.weight[tokeniser.end_token])
        model.embedding.weight[tokeniser.end_token] *= 3
    save_model(model, tmp_path / "ends", tokeniser=tokeniser)
    greedy = SamplingSpec(max_tokens=5, temperature=0.0)
    stopped = generate_text(str(tmp_path / "ends"), PROMPT, greedy)
    assert (stopped["finish_reason"], stopped["tokens"], stopped["text"]) == ("stop", 0, "")
    went_on = generate_text(str(write_small_folder(tmp_path / "tiny")), PROMPT, greedy)
    assert (went_on["finish_reason"], went_on["tokens"]) == ("length", 5)


def test_unusable_requests_are_refused(folder):
    """An empty prompt, a bad specification and an unknown model are refused in words."""
    with pytest.raises(InputError, match="the prompt is empty"):
        generate_text(str(folder), b"", SamplingSpec(max_tokens=1))
    with pytest.raises(InputError, match="max_tokens is 0"):
        generate_text("nowhere", PROMPT, SamplingSpec(max_tokens=0))
    with pytest.raises(ModelFolderError, match="no model at 'nowhere'"):
        generate_text("nowhere", PROMPT, SamplingSpec(max_tokens=1))
