"""From drawn tokens to text and scores: nothing is torn, and what a stop string takes away takes its tokens along."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from dist_attn_service.text.choice_text import ChoiceText, ScoredToken
from dist_attn_service.text.tokenising import ThreadTokeniser
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import TokenLogprobs

TOKENISER = ThreadTokeniser(ByteTokeniser(), ThreadPoolExecutor(1))


def told(value: float, *others: int) -> TokenLogprobs:
    """What the engine says of a draw."""
    return TokenLogprobs(value, list(others), [value - k for k in range(len(others))])


def spell(data: bytes, *stops: str, offset: int = 0) -> tuple[str, list[ScoredToken]]:
    """The text and the scored tokens of these bytes, one token each, taken as they become certain."""
    choice = ChoiceText(TOKENISER, stops, offset=offset)
    text, scored = "", []
    for token in data:
        text += choice.push(token, told(-1.0))
        scored += choice.take_scored()
        if choice.stopped:
            return text, scored
    text += choice.finish()
    return text, scored + choice.take_scored()


def test_offsets_are_where_a_token_begins() -> None:
    """Tokens of one character share its place, and the prompt that stands before counts."""
    text, scored = spell("aé€b".encode(), offset=5)
    assert text == "aé€b"
    assert [token.offset for token in scored] == [5, 6, 6, 7, 7, 7, 8]
    assert [token.text for token in scored][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]


def test_a_stop_string_takes_its_tokens_along() -> None:
    """The tokens of the text before the stop string are given, and those of the string itself are not."""
    text, scored = spell(b"one two", " tw")
    assert (text, "".join(token.text for token in scored)) == ("one", "one")


def test_what_might_be_a_stop_string_is_given_once_it_is_none() -> None:
    """Held back text comes with its tokens as soon as it is certain, at the latest at the end."""
    choice = ChoiceText(TOKENISER, ("abc",))
    assert choice.push(ord("a"), told(-1.0)) == "" and choice.take_scored() == []
    assert choice.push(ord("b"), told(-2.0)) == "" and choice.take_scored() == []
    assert choice.push(ord("x"), told(-3.0)) == "abx"
    assert [token.logprob for token in choice.take_scored()] == [-1.0, -2.0, -3.0]
    assert choice.push(ord("a"), told(-4.0)) == ""
    assert choice.finish() == "a" and [token.logprob for token in choice.take_scored()] == [-4.0]


def test_what_a_text_begins_with_may_be_left_out() -> None:
    """Once, at its beginning, in pieces too; the tokens keep their places."""
    choice = ChoiceText(TOKENISER, (), lead=" ")
    assert [choice.push(token, told(-1.0)) for token in b"  a "] == ["", " ", "a", " "]
    assert [token.offset for token in choice.take_scored()] == [0, 1, 2, 3]


def test_the_drawn_token_is_among_the_likeliest() -> None:
    """The top has the asked-for tokens and the drawn one, and minus infinity becomes a number that JSON has."""
    choice = ChoiceText(TOKENISER, ())
    choice.push(ord("a"), TokenLogprobs(float("-inf"), [98, 99], [-0.5, -1.0]))
    choice.push(ord("b"), TokenLogprobs(-0.25))
    first, second = choice.take_scored()
    assert first.top == {"b": -0.5, "c": -1.0, "a": -9999.0} and first.logprob == -9999.0
    assert second.top == {}


@given(st.binary(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_tokens_and_text_agree(data: bytes, stops: list[str]) -> None:
    """Whatever is drawn: offsets never fall, lie inside the text, and without a stop every token is given once."""
    text, scored = spell(data, *stops)
    offsets = [token.offset for token in scored]
    assert offsets == sorted(offsets)
    assert all(offset < max(1, len(text)) for offset in offsets)
    if not any(stop in data.decode(errors="replace") for stop in stops):
        assert text == data.decode(errors="replace")
        assert len(scored) == len(data)


@pytest.mark.parametrize(("token", "text"), [(97, "a"), (0xE2, "bytes:\\xe2"), (256, "")])
def test_a_token_by_itself(token: int, text: str) -> None:
    """Whole characters are shown as they are, other bytes by their numbers, the end token as nothing."""
    assert TOKENISER.token_text(token) == text
