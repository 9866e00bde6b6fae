"""One Chromium for all tests of the page; without one they are skipped, and say why."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.chromium import chromium, why_no_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser; each test opens a profile of its own in it."""
    lack = why_no_chromium()
    if lack:
        pytest.skip(lack)
    with chromium() as running:
        yield running
