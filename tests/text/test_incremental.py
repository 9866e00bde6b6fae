"""Text that appears token by token."""

import pytest

from dist_attn.errors import TokenError
from dist_attn.text import ByteTokeniser, IncrementalDecoder


def test_character_waits() -> None:
    """A character of several tokens appears when its last byte arrives, not before."""
    decoder = IncrementalDecoder(ByteTokeniser())
    assert [decoder.push(byte) for byte in "é🙂!".encode()] == ["", "é", "", "", "", "🙂", "!"]
    assert decoder.finish() == ""


def test_broken_character() -> None:
    """A character that never becomes whole is U+FFFD: at once when another one starts, else at the end."""
    decoder = IncrementalDecoder(ByteTokeniser())
    assert [decoder.push(byte) for byte in b"\xe2\x80A\xff\xc3"] == ["", "", "\ufffdA", "\ufffd", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.push(ord("b")) == "b"


def test_end_token_is_silent() -> None:
    """The end token adds no text and does not break a character that is waiting."""
    tokeniser = ByteTokeniser()
    decoder = IncrementalDecoder(tokeniser)
    assert [decoder.push(t) for t in (0xC3, tokeniser.end_token, 0xA9)] == ["", "", "é"]


def test_unknown_id() -> None:
    """An unknown id is refused and leaves the decoder as it was."""
    decoder = IncrementalDecoder(ByteTokeniser())
    decoder.push(0xC3)
    with pytest.raises(TokenError, match="257"):
        decoder.push(257)
    assert decoder.push(0xA9) == "é"
