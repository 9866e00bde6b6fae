"""Counts as people write them: 2M, 500k, 1_000_000."""

import re
from decimal import Decimal

from dist_attn.errors import InputError

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(\.\d+)?\s?([kmgbt]?)", re.IGNORECASE | re.ASCII)
_LARGEST = 1 << 53  # what JSON readers keep exact
_LONGEST = 64  # characters


def parse_count(text: str, what: str = "tokens") -> int:
    """The whole number, 1 or more, that `text` writes: with k, M, G (or B) or T as powers of 1,000, with _ or commas.

    Raises: InputError for anything else.
    """
    shown = repr(text[:40])
    match = _COUNT.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise InputError(f"{shown} is not a number of {what}; write it like 2M, 500k, 1.5M or 1_000_000")
    digits, fraction, suffix = match.groups()
    value = Decimal(digits.replace("_", "").replace(",", "") + (fraction or "")) * _SUFFIXES[suffix.lower()]
    if value != int(value):
        raise InputError(f"{shown} is {value} {what}; needed is a whole number, like 2M, 500k or 1_000_000")
    if not 1 <= value <= _LARGEST:
        raise InputError(f"{shown} {what} were given; needed are at least 1 and at most 2^53")
    return int(value)
