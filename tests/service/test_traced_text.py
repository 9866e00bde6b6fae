"""Texts that know which of their characters are a template's own: here these are the capitals."""

from collections.abc import Callable
from typing import Any

import pytest
from dist_attn_service.completions.traced_text import SpecialTokens, TracedText, joined
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.text(st.sampled_from("AaBb \n\t-"), max_size=12)


def traced(text: str) -> TracedText:
    """With the capitals as its own."""
    return TracedText(text, bytes(character.isupper() for character in text))


OPERATIONS: dict[str, Callable[[Any, Any, int], Any]] = {
    "add": lambda text, other, n: text + other,
    "add to plain text": lambda text, other, n: str.__str__(other).lower() + text,
    "multiply": lambda text, other, n: n * text * 2,
    "index": lambda text, other, n: text[n] if -len(text) <= n < len(text) else "",
    "slice": lambda text, other, n: text[n : -n or None : n or 1],
    "join": lambda text, other, n: text.join([other, "a", text]),
    "strip": lambda text, other, n: text.strip(),
    "strip characters": lambda text, other, n: text.lstrip(other) + text.rstrip(other) + text.strip("aA"),
    "remove": lambda text, other, n: text.removeprefix(other) + text.removesuffix(other),
    "split": lambda text, other, n: text.split(None, n) + text.rsplit(None, n) + text.split(),
    "split at": lambda text, other, n: text.split(other or "a", n) + text.rsplit(other or "a", n),
    "lines": lambda text, other, n: text.splitlines() + text.splitlines(True),
    "part": lambda text, other, n: [*text.partition(other or "a"), *text.rpartition(other or "a")],
    "replace": lambda text, other, n: text.replace(other, "AaA", n) + text.replace("A", other),
    "text": lambda text, other, n: str(text),
    "joined": lambda text, other, n: joined([text, "a", other]),
    "format": lambda text, other, n: type(text)("{}").format(text),
    "upper": lambda text, other, n: text.lower().upper(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=TEXTS, other=TEXTS, n=st.integers(-3, 3))
def test_no_character_becomes_a_templates_own(name: str, text: str, other: str, n: int) -> None:
    """Each operation gives the plain texts' result, in which no more characters than before are the template's own."""
    work = OPERATIONS[name]
    wanted, found = work(text, other, n), work(traced(text), traced(other), n)
    assert found == wanted
    for one in found if isinstance(found, list) else [found]:
        own = one._own if isinstance(one, TracedText) else bytes(len(one))
        capitals = traced(one)._own
        assert all(is_capital for is_own, is_capital in zip(own, capitals, strict=True) if is_own)
        assert own == capitals or type(one) is str or name == "replace"  # what it puts in is plain


def test_the_longest_special_token_is_found_in_own_text_alone() -> None:
    """Where several begin at one place; one that a client's text only helps to write is none."""
    tokens = SpecialTokens({"AA": 1, "AAB": 2, "BaB": 3, "B": 4})
    assert tokens.cut(traced("AABAAaAAaBaB")) == [2, 1, "a", 1, "a", 4, "a", 4]
    assert SpecialTokens({}).cut(traced("AB")) == ["AB"]
