"""Every kind of mixer that sees both sides from a training file of images to rows: trained, saved, loaded, encoding."""

from pathlib import Path

import pytest

from papers.tests.support.tasks import small_task
from tests.training.test_every_kind import RUN, WHOLE, _encoder, assert_trains_and_encodes


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_kind_that_sees_both_sides_trains_and_encodes(tmp_path: Path, name: str) -> None:
    """A classifier of images learns with it, and a text encoder gives the same rows on one and on three ranks."""
    config = small_task("vision", tmp_path / "run", model={"encoder": _encoder(name)}, data={"batch": 20}, run=RUN)
    assert_trains_and_encodes(tmp_path, config, name)
