"""The comparison with sentence-transformers runs."""

import pytest

from benchmarks.peers import absent
from dist_attn_papers.studies import encoder_speed

MISSING = absent(encoder_speed.PEER)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
def test_the_study_runs() -> None:
    """Its smallest sizes give all ratios."""
    found = encoder_speed.measure(smoke=True)
    assert found.ratios.keys() == {"one thread, fastest peer", "short sentences", "one stream"} and all(
        r > 0 for r in found.ratios.values()
    )
