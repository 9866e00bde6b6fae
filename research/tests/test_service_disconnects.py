"""Clients that leave: the measurement sees the work of each phase begin and end."""

import asyncio

from dist_attn_research.service.disconnects import PHASES, observe
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import running_service


def test_work_ends_in_every_phase(tmp_path):
    """One client per phase leaves, and what it had open is gone from the engine."""
    with running_service(tmp_path, FakeEngine(hold_replies=True)) as service:
        seen = asyncio.run(observe(service.url, 1, longest_s=0.1))
        assert service.engine.open_count == 0
    assert [left.phase for left in seen] == list(PHASES)
    assert all(left.seconds >= 0 for left in seen)
