"""Peers that are not installed say why."""

import pytest

from benchmarks import peers
from benchmarks.peers import absent


def test_a_peer_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library, one whose own needs are missing, and one that breaks are told apart in words."""
    modules = {"gone": "no_such_library.part", "broken": "json.no_such_part", "there": "json"}
    monkeypatch.setattr(peers, "MODULES", modules)
    peers._load.cache_clear()
    try:
        found = absent(*modules)
    finally:
        peers._load.cache_clear()
    assert found.keys() == {"gone", "broken"}
    assert found["gone"] == peers.INSTALL
