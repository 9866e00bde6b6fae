"""What the page does with much text and many tokens, watched in a real browser with less of both."""

import json

import pytest

from dist_attn_papers.page import tokens as page_tokens
from dist_attn_papers.page import upload as page_upload
from tests.support.chromium import why_no_chromium

pytestmark = pytest.mark.skipif(bool(why_no_chromium()), reason=why_no_chromium() or "")


def test_drawn_tokens_are_held_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two times 9,000 tokens: the page ends with what was drawn last, and neither its text nor its heap grows on."""
    monkeypatch.setattr(page_tokens, "AT_ONCE", 9000)
    found = page_tokens.measure(18_000)
    assert len(found.held) == 3 and found.position > found.tokens == 18_000
    assert found.ends_right and found.characters <= page_tokens.MOST_CHARACTERS
    assert found.held[2].heap - found.held[1].heap < 1_000_000
    assert json.loads(found.as_json())["report"]["steps"] > 1 and "18,000 tokens" in found.as_markdown()


def test_a_file_is_watched_from_the_click_to_the_map() -> None:
    """Every passage of the file is there in the end, and lag, tasks, memory and progress were measured meanwhile."""
    found = page_upload.measure(0.3)
    seen = found.report
    assert found.tokens > 60_000 and found.rows >= found.tokens // 512
    assert 0 <= seen.lag_p50_ms <= seen.lag_p99_ms <= seen.lag_max_ms and seen.steps > 1
    assert seen.most.own >= seen.after.heap > 1_000_000 and seen.after.nodes > 100
    assert json.loads(found.as_json())["case"] == "page-upload" and "page-upload" in found.as_markdown()
