"""A text that beam search finds, from a model folder."""

import pytest

from dist_attn.errors import InputError
from dist_attn.generation.text import generate_text
from dist_attn.wire.messages import SamplingSpec
from dist_attn_papers.translation.beam_search import BeamSpec
from dist_attn_papers.translation.text import search_text
from tests.support.models import write_small_folder

PROMPT = b"It was a cold morning"


@pytest.fixture
def folder(tmp_path):
    """A small model, whose tokens are bytes."""
    return write_small_folder(tmp_path / "tiny")


def test_a_search_of_one_beam_is_the_greedy_text(folder):
    """One beam finds the text of temperature 0, and more beams find one that is at least as likely."""
    greedy = generate_text(str(folder), PROMPT, SamplingSpec(max_tokens=8, temperature=0.0))
    one, four = (search_text(str(folder), PROMPT, BeamSpec(n, 8, 0.0)) for n in (1, 4))
    assert (one["text"], one["tokens"]) == (greedy["text"], greedy["tokens"])
    assert four["log_probability"] >= one["log_probability"]
    with pytest.raises(InputError, match="the prompt is empty"):
        search_text(str(folder), b"", BeamSpec(1, 8, 0.0))
