"""How many examples of a property are tried."""

from typing import Any

from hypothesis import settings

FULL = 100
"""What a profile that tries everything has."""


def examples(count: int, **options: Any) -> settings:
    """So many in `make test-all`, and in `make test` no more than its profile has."""
    usual = settings.default.max_examples
    return settings(max_examples=count if usual >= FULL else min(count, usual), **options)
