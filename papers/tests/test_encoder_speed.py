"""The comparison with sentence-transformers runs."""

import pytest

from benchmarks.peers import absent
from dist_attn_papers.studies import encoder_speed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of exporters
def test_the_study_runs() -> None:
    """Its smallest sizes give all ratios."""
    if missing := absent(encoder_speed.PEER):  # asked only now: it takes seconds to load
        pytest.skip(str(missing))
    found = encoder_speed.measure(smoke=True)
    asked = {"one thread, fastest peer", "one short sentence", "short sentences", "one stream"}
    assert found.ratios.keys() == asked and all(r > 0 for r in found.ratios.values())
