"""A fresh store of every kind, for the tests that all of them pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import KINDS, StorePlace, place_of, why_no_redis


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorePlace]:
    """A fresh place of every kind."""
    if request.param == "redis" and (lack := why_no_redis()):
        pytest.skip(lack)
    if request.param.startswith("objects"):
        pytest.importorskip("obstore", reason="needs obstore: pip install -e '.[obstore]'")
    with place_of(request.param, tmp_path) as fresh:
        yield fresh
