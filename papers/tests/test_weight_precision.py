"""The study of weights in fewer bits: what it scores, by blocks and by steps."""

import numpy as np
import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import SLOTS
from dist_attn.models import weight_bytes, weight_precision_of
from dist_attn.training.evaluation import score_tokens
from dist_attn_papers.studies import weight_precision
from dist_attn_papers.studies.decoding_forms import Sizes, StateForm, language_model
from dist_attn_papers.studies.weight_precision import FLOAT32, FORMS, WHOLLY, bits_of_steps, form

TINY = Sizes(width=32, layers=2, heads=2, mlp=64, vocabulary=64)
TEXT = b"Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes. " * 12


def test_forms_are_what_they_are_called() -> None:
    """Every form holds its weights as it says, in ever fewer bytes; the last one has nothing in float32."""
    models = {name: form(name)[0] for name in FORMS}
    assert [weight_precision_of(models[name]) for name in FORMS[:3]] == list(FORMS[:3])
    sizes = [weight_bytes(models[name]) for name in (FLOAT32, "bfloat16", "int8")]
    assert sizes == sorted(sizes, reverse=True)
    assert {p.dtype for p in models[WHOLLY].parameters()} == {torch.bfloat16}


def test_steps_score_what_blocks_score() -> None:
    """Pieces fed token by token cost what the same pieces cost read at once, each from the empty state."""
    model, tokeniser = form(FLOAT32)
    tokens = tokeniser.encode(TEXT)
    count = 12
    got = bits_of_steps(model, tokeniser, tokens, count)
    bits, num_bytes = 0.0, 0
    for start in np.linspace(0, len(tokens) - count, SLOTS).astype(int):
        piece = tokens[start : start + count]
        # The first token of a text costs the same whatever the model.
        bits += score_tokens(model, piece, 1).bits - np.log2(model.config.vocab_size)
        num_bytes += int(tokeniser.byte_lengths(piece[1:]).sum())
    assert got == pytest.approx(bits / num_bytes, rel=1e-4)


def test_int8_decodes_beside_the_other_forms() -> None:
    """The decoding study's int8 form steps, and holds states of the same size as the float32 one."""
    forms = [StateForm(language_model(TINY, precision), 3, 5) for precision in ("float32", "int8")]
    for one in forms:
        one.steps(2)()
    assert forms[0].held_bytes == forms[1].held_bytes


def test_a_missing_book_is_said(monkeypatch, tmp_path) -> None:
    """Without the book there is no number, and the error says where it belongs."""
    monkeypatch.setattr(weight_precision, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match="war_and_peace"):
        weight_precision.scores(100, 4)
