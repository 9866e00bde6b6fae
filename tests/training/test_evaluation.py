"""Bits per byte: one pass in blocks equals the plainest scoring, and an empty text is refused."""

import math

import numpy as np
import pytest
import torch

from dist_attn.errors import InputError
from dist_attn.training import evaluation
from dist_attn.training.evaluation import evaluate_file, score_tokens
from tests.support.models import small_config, small_model, write_small_folder


@torch.no_grad()
def test_scores_are_those_of_one_pass(monkeypatch):
    """Scored in blocks with a carried state, a text costs what the logits of one pass say, the first token log2 V."""
    monkeypatch.setattr(evaluation, "_BLOCK_TOKENS", 16)
    model = small_model().double()
    for length in (1, 2, 17, 75):
        tokens = np.random.default_rng(length).integers(0, 257, length).astype(np.int32)
        stream = torch.from_numpy(tokens.astype(np.int64))
        log_p = model.logits(stream[None])[0].log_softmax(-1)
        want = math.log(257) - sum(float(log_p[t, stream[t + 1]]) for t in range(length - 1))
        score = score_tokens(model, tokens, 2 * length)
        assert (score.num_tokens, score.num_bytes) == (length, 2 * length)
        assert score.bits == pytest.approx(want / math.log(2), rel=1e-5)
        assert score.bits_per_byte == pytest.approx(score.bits / (2 * length))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
@pytest.mark.parametrize("context", [2, 7, 16])
def test_a_context_hides_what_lies_before_its_window(monkeypatch, kind, context):
    """Each token is scored once, by the first window of `context` inputs, begun every half context, that reaches it."""
    monkeypatch.setattr(evaluation, "_BLOCK_TOKENS", 3 * context)
    model = small_model(small_config(kind)).double()
    stride = context // 2
    for length in (1, 2, context, context + 1, context + stride + 1, 75):
        tokens = np.random.default_rng(length).integers(0, 257, length).astype(np.int32)
        stream = torch.from_numpy(tokens.astype(np.int64))
        want = math.log(257)
        for target in range(1, length):
            stop = context
            while stop < target:
                stop += stride
            stop = min(stop, length - 1)
            window = stream[max(0, stop - context) : stop]
            row = target - 1 - max(0, stop - context)
            assert row + 1 >= min(target, context - stride + 1)
            want -= float(model.logits(window[None])[0, row].log_softmax(-1)[stream[target]])
        score = score_tokens(model, tokens, length, context)
        assert score.bits == pytest.approx(want / math.log(2), rel=1e-5)


def test_a_context_that_covers_the_text_changes_nothing():
    """One window that holds all tokens gives the score of the carried state; a context below 2 is refused."""
    tokens = np.random.default_rng(0).integers(0, 257, 40).astype(np.int32)
    model = small_model()
    assert score_tokens(model, tokens, 40, 64).bits == pytest.approx(score_tokens(model, tokens, 40).bits, rel=1e-6)
    with pytest.raises(InputError, match="a context of 1 tokens was given"):
        score_tokens(model, tokens, 40, 1)


def test_a_file_is_scored_in_its_bytes(tmp_path):
    """A file's report counts its bytes and tokens and names the model."""
    folder = write_small_folder(tmp_path / "tiny")
    report = evaluate_file(tmp_path / "text", "naïve".encode(), str(folder))
    assert report["bytes"] == report["tokens"] == 6
    assert report["model"] == "tiny"
    assert report["bits_per_byte"] > 0


def test_empty_texts_are_refused(tmp_path):
    """Nothing to score is an InputError with the file's name, not a division by zero."""
    with pytest.raises(InputError, match="text is empty"):
        score_tokens(small_model(), np.empty(0, dtype=np.int32), 0)
    with pytest.raises(InputError, match=r"empty\.txt is empty"):
        evaluate_file(tmp_path / "empty.txt", b"", None)
