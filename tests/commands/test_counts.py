"""Counts as people write them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.commands.options import parse_count
from dist_attn.errors import InputError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("2M", 2_000_000),
        ("500k", 500_000),
        ("500K", 500_000),
        ("1.5M", 1_500_000),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        ("3G", 3 * 10**9),
        ("3b", 3 * 10**9),
        ("1T", 10**12),
        (" 7 ", 7),
        ("0.25k", 250),
        ("2 M", 2_000_000),
    ],
)
def test_reads(text: str, count: int) -> None:
    """Suffixes are powers of a thousand, in either case; underscores and commas are only for the eye."""
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "M", "-3", "+3", "0", "0k", "1e6", "1.5", "1.2345k", "two", "2MM", "2MB", "1__0", "_1", "1_", "1,00", "10.",
     ".5M", "0x10", "½", "٣", "nan", "inf", "1 0", "9007199254740993", "10000T", "1\n2", "9" * 5000],
)  # fmt: skip
def test_refuses(text: str) -> None:
    """Anything else is refused in one short line that shows how to write it."""
    with pytest.raises(InputError) as caught:
        parse_count(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@given(st.integers(min_value=1, max_value=1 << 53))
def test_whole_numbers_read_back(count: int) -> None:
    """Every count reads back from its digits, with and without separators."""
    assert parse_count(str(count)) == parse_count(f"{count:_}") == parse_count(f"{count:,}") == count


@given(st.text(max_size=12))
def test_never_fails_otherwise(text: str) -> None:
    """Any text gives a count in range or an InputError."""
    with contextlib.suppress(InputError):
        assert 1 <= parse_count(text) <= 1 << 53
