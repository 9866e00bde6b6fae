"""The study of cost by position: every reading scores the tokens it says, bins cover the text, and gains add up."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.setting import look_around
from dist_attn_papers.studies import perplexity_by_position as study
from dist_attn_papers.studies.perplexity_by_position import CARRIED, PerplexityByPosition, token_nats
from tests.support.models import small_model


@torch.no_grad()
@pytest.mark.parametrize("reset", [None, 4, 16, 32])
def test_a_reading_sees_what_lies_since_its_reset(monkeypatch, reset):
    """Each token costs what one pass over the tokens since the last reset says, whatever the blocks are."""
    monkeypatch.setattr(study, "BLOCK_TOKENS", 16)
    model = small_model().double()
    tokens = np.random.default_rng(0).integers(0, 257, 75).astype(np.int32)
    stream = torch.from_numpy(tokens.astype(np.int64))
    nats = token_nats(model, tokens, reset)
    assert nats.shape == (74,)
    for t in range(74):
        begin = 0 if reset is None else t // reset * reset
        log_p = model.logits(stream[None, begin : t + 1])[0, -1].log_softmax(-1)
        assert nats[t] == pytest.approx(-float(log_p[stream[t + 1]]), rel=1e-4)


@pytest.mark.parametrize(("total", "edges"), [(300, [0, 300]), (1400, [0, 512, 1400]), (1500, [0, 512, 1024, 1500])])
def test_bins_cover_the_text_in_octaves(total, edges):
    """Bins begin at 0 and 512, double, and end with the text; a short rest is no bin of its own."""
    assert study._edges(total) == edges


def test_a_gain_that_grows_is_seen_as_such():
    """Resets that cost ever more give a positive slope of the right size, and the gain of a bin is the difference."""
    lengths = np.full(100_000, 3)
    noise = 0.01 * np.random.default_rng(0).standard_normal(100_000)
    gain = (0.1 + 0.2 * np.arange(100_000) / 1e5) * 3 * math.log(2) + noise
    trend = study._trend(gain, lengths)
    assert trend.slope == pytest.approx(0.2, rel=0.02)
    assert 0 < trend.error < 0.002
    assert trend.second_half - trend.first_half == pytest.approx(0.1, rel=0.15)
    part = study._bin(0, 1000, {CARRIED: np.zeros(100_000), "reset": gain}, lengths)
    assert part.gain["reset"] == pytest.approx(0.101, rel=0.02)
    assert part.perplexity[CARRIED] == 1.0


def test_the_study_reads_and_draws(tmp_path, monkeypatch):
    """A short reading gives tables that name every bin and reading, JSON that parses, and a figure."""
    monkeypatch.setattr(study, "SMOKE_BYTES", 3000)
    finding = study.measure(True)
    assert isinstance(finding, PerplexityByPosition)
    assert list(finding.whole) == [CARRIED, "reset every 512", "reset every 4,096", "reset every 32,768"]
    assert finding.bins[-1].stop == finding.tokens - 1
    assert sum(part.num_bytes for part in finding.bins) <= finding.num_bytes == 3000
    gained = finding.whole["reset every 512"] - finding.whole[CARRIED]
    weighted = sum(part.gain["reset every 512"] * part.num_bytes for part in finding.bins)
    assert weighted / sum(part.num_bytes for part in finding.bins) == pytest.approx(gained)
    assert finding.as_markdown().count("reset every 4,096") >= 3
    assert json.loads(finding.as_json())["tokens"] == finding.tokens
    finding.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_book_is_named(tmp_path, monkeypatch):
    """Without the book the study says which file it needs."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    with pytest.raises(study.ConfigError, match=r"war_and_peace\.txt is not there"):
        study.measure(False)
    assert look_around().threads >= 1
