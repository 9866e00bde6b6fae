"""The writer's texts and first weights."""

import random
import re

import pytest
import torch

from dist_attn.checkpoints import load_model, resolve_model_folder
from dist_attn.errors import ConfigError
from dist_attn.text import ByteTokeniser, load_tokeniser
from dist_attn_papers.writer.prepare import ADDED, BEGINS_WITH, grow
from dist_attn_papers.writer.store import on_grid
from dist_attn_papers.writer.texts import NOVELS, as_chat, lay_out, novels, paragraphs_of, turns
from dist_attn_papers.writer.words import PROMPTS, continuations, decoded, words_of
from tests.support.models import small_config, small_model

PARAGRAPHS = [
    "CHAPTER I",
    "It was _late_ & dark.",
    '"Who is there?" said he.',
    '"A friend," she said, "and a cold one."',
]


def test_layouts_keep_the_words():
    """However a part is laid out, its words stay in order."""
    seen = set()
    for seed in range(40):
        text = lay_out(PARAGRAPHS, random.Random(seed))
        seen.add(text)
        words = re.findall(r"[a-z]+", re.sub(r"</?(h2|p)>", " ", text).replace("&amp;", "&").lower())
        assert words == re.findall(r"[a-z]+", " ".join(PARAGRAPHS).lower())
    assert len(seen) >= 4


def test_another_edition_is_refused(tmp_path):
    """A novel with other bytes than those that were trained on is refused with the digest that is needed."""
    digest, name = NOVELS.read_text().split()[:2]
    with pytest.raises(ConfigError, match="--books names their folder"):
        novels(tmp_path)
    (tmp_path / name).write_text("Another translation.")
    with pytest.raises(ConfigError, match=f"{name} is not the one .* {digest}"):
        novels(tmp_path)


def test_turns_are_what_is_said():
    """Paragraphs that speak one after the other become turns, without who said so."""
    (run,) = turns(paragraphs_of("\n\n".join(PARAGRAPHS)))
    assert as_chat(run) == "User: Who is there?\n\nAssistant: A friend, and a cold one."


def test_a_grown_model_computes_the_same():
    """Over the same tokens the larger model has the smaller one's hidden states."""
    small, tokeniser = load_model(BEGINS_WITH), load_tokeniser(resolve_model_folder(BEGINS_WITH))
    large = grow(small, tokeniser, tokeniser, ADDED).eval()
    tokens_1L = torch.from_numpy(tokeniser.encode(b"It was the best of times")).long()[None]
    with torch.inference_mode():
        torch.testing.assert_close(large.encode(tokens_1L), small.encode(tokens_1L), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"readout": "own"}, {"positions": {"kind": "learned", "length": 9}}, {"positions": "concatenated"}],
)
def test_what_would_be_left_behind_is_refused(changes):
    """Weights beside embedding, layers and norm would begin anew, and the model would not compute the same."""
    small, tokeniser = small_model(small_config(**changes)), ByteTokeniser()
    with pytest.raises(ConfigError, match="needed are readout = tied, and positions = none or sinusoidal"):
        grow(small, tokeniser, tokeniser, ADDED)


def test_stored_weights_are_multiples_of_a_power_of_two_near_the_given_ones():
    """Rounded by half a step at most, in float16 exactly, and vectors not at all."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 0.03
    stored = on_grid(weight)
    step = 2.0**-10  # 0.03 / 16 and more
    assert torch.equal(stored, (stored / step).round() * step)
    assert torch.equal(stored.half().float(), stored)
    assert float((stored - weight).abs().max()) <= step / 2
    assert torch.equal(on_grid(weight[0]), weight[0])


def test_prompts_are_continued_the_same_way_again():
    """Every prompt gets as many tokens as asked for, from a seed; where a text ends, so does its last word."""
    tokeniser = ByteTokeniser()
    model = small_model()
    drawn = continuations(model, tokeniser, 5)
    assert len(drawn) == len(PROMPTS) and drawn == continuations(model, tokeniser, 5)
    ended = [*tokeniser.encode(b"the cat's"), tokeniser.end_token, *tokeniser.encode(b"Dog 9")]
    assert words_of(decoded(tokeniser, ended)) == ["the", "cat", "s", "Dog"]
