"""The measurement of long documents through the API, with a client that reads and one that does not."""

import json

from dist_attn_research.service.streaming import measure


def test_both_clients_are_watched():
    """Every token of both documents reaches the engine, and memory and waits are measured all the while."""
    found = measure(1)
    reads, never = found.rows
    assert (reads.client, never.client) == ("reads", "never reads")
    assert reads.tokens == never.tokens > 100_000
    for row in found.rows:
        assert row.before_bytes > 1 << 20
        assert 0 < row.livez_p50_ms <= row.livez_p99_ms <= row.livez_max_ms
        assert row.grew_bytes >= 0
    assert json.loads(found.as_json())["megabytes"] == 1
    assert "| never reads |" in found.as_markdown()
