"""The measurement of idle ranks: what counts, and a real service that is kept at work."""

import pytest

from dist_attn_papers.studies import busy_ranks
from dist_attn_papers.studies.busy_ranks import Look, idle_share, measure
from tests.support.models import write_small_folder


def test_the_rank_that_is_idle_most_counts():
    """Of several ranks the idle share is that of the one that worked least."""
    assert idle_share(Look(2.0, (1.0, 2.0)), Look(12.0, (10.5, 10.0))) == pytest.approx(0.2)


@pytest.mark.slow
def test_a_service_at_work(tmp_path, monkeypatch):
    """A service of its own that reads two documents has a rank that is at work."""
    monkeypatch.setattr(busy_ranks, "MODEL", str(write_small_folder(tmp_path / "model")))
    monkeypatch.setattr(busy_ranks, "SMOKE_STRETCH_S", 0.5)
    found = measure(smoke=True)
    assert found.ratios.keys() == {"idle share, 1 rank"}
    # A stretch this short begins and ends with whole steps.
    assert -0.5 < found.ratios["idle share, 1 rank"] < 0.9
