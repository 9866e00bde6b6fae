"""The comparison with sentence-transformers runs."""

import pytest

from benchmarks.peers import absent
from dist_attn_papers.studies import encoder_speed

MISSING = absent(encoder_speed.PEER)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of exporters
@pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
def test_the_study_runs() -> None:
    """Its smallest sizes give all ratios."""
    found = encoder_speed.measure(smoke=True)
    asked = {"one thread, fastest peer", "one short sentence", "short sentences", "one stream"}
    assert found.ratios.keys() == asked and all(r > 0 for r in found.ratios.values())
