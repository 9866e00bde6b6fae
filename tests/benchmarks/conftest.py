"""Benchmarks in tests measure nothing: what takes the machine's rates is made small."""

import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 64 KiB in the place of 64 MiB, which take longer to make than whatever else a test does."""
    monkeypatch.setattr(timing, "COPY_BYTES", 1 << 16)
