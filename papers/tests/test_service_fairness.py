"""The measurement of fairness: what it counts, and that what it files can be read."""

import asyncio
import json
from dataclasses import replace

import pytest

from benchmarks.setting import look_around
from dist_attn_papers.service.fairness import Fairness, Plan, observe
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import running_service

QUICK = Plan(tokens=30_000, streams=2, turns=1, seconds=0.5, settle_s=0.1, short_every_s=0.05)


def test_waits_and_speeds_are_counted_in_all_parts(tmp_path):
    """Streams, short requests and the long text all leave numbers, idle and beside each other."""
    with running_service(tmp_path, FakeEngine(draw_seconds=0.002)) as service:
        row = asyncio.run(observe(service.url, 1, QUICK))
    assert row.ranks == 1
    assert 0 <= row.idle_p50_ms <= row.idle_p99_ms
    assert 0 <= row.beside_p50_ms <= row.beside_p99_ms
    assert min(row.idle_p99_ms, row.beside_p99_ms) > 0
    assert row.short_requests > 0
    assert 0 < row.first_token_beside_median_s <= row.first_token_beside_max_s
    assert min(row.reading_alone, row.reading_beside) > 0
    assert len(row.gaps_idle_ms) == 99
    found = Fairness(look_around(), QUICK, (row,))
    assert json.loads(found.as_json())["rows"][0]["ranks"] == 1
    assert f"{row.p99_times_idle:.2f} |" in found.as_markdown()
    found.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_slow_machine_is_given_more_time(tmp_path):
    """Parts that are over before anything came last until there is something to count."""
    hurried = replace(QUICK, seconds=0.0, settle_s=0.0)
    with running_service(tmp_path, FakeEngine(draw_seconds=0.1)) as service:
        row = asyncio.run(observe(service.url, 1, hurried))
    assert row.short_requests > 0
    assert min(row.reading_alone, row.reading_beside) > 0


def test_an_engine_that_fails_ends_the_measurement(tmp_path):
    """Numbers of requests that went wrong would look better than they are."""
    with running_service(tmp_path, FakeEngine(fail_at=100)) as service, pytest.raises(RuntimeError):
        asyncio.run(observe(service.url, 1, QUICK))
