"""The cut into pieces: where it falls in prose, and the caps that make it work on a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.text.base import TAIL_BYTES
from dist_attn.text.pieces import MAX_PIECE_BYTES, cut, cut_blocks


def pieces(text: str) -> list[str]:
    """The pieces of a whole text."""
    data = text.encode()
    return [piece.decode() for piece in cut(data, 0, len(data), final=True).pieces]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", " world"]),
        ("the count's friend", ["the", " count", "'s", " friend"]),
        ("Isn't it", ["Isn", "'t", " it"]),
        ("they'll've", ["they", "'ll", "'ve"]),
        ("she’d said", ["she", "’d", " said"]),
        ("'tis 'some' dogs' tails", ["'", "tis", " '", "some", "'", " dogs", "'", " tails"]),
        ("“Well,” he", ["“", "Well", ",”", " he"]),
        ("end.\n\nNext", ["end", ".", "\n\n", "Next"]),
        ("in 12345 days", ["in", " 123", "45", " days"]),
        ("a    b", ["a", "   ", " b"]),
        ("a  \n b", ["a", " ", " ", "\n", " b"]),
        ("\t\tx\r\n", ["\t\t", "x", "\r\n"]),
        ("naïve café", ["naïve", " café"]),
    ],
)
def test_prose(text: str, expected: list[str]) -> None:
    """Words keep the blank before them; contractions, quotes, numbers and line ends are pieces of their own."""
    assert pieces(text) == expected


@given(st.binary(max_size=300))
def test_covers_all_bytes(data: bytes) -> None:
    """The pieces of any bytes join to these bytes, and none is longer than MAX_PIECE_BYTES."""
    found = cut(data, 0, len(data), final=True).pieces
    assert b"".join(found) == data
    assert all(len(piece) <= MAX_PIECE_BYTES for piece in found)


@given(st.binary(min_size=TAIL_BYTES, max_size=2 * TAIL_BYTES), st.binary(max_size=100))
def test_looks_ahead_no_further(head: bytes, rest: bytes) -> None:
    """The first piece is decided by TAIL_BYTES bytes, whatever follows them."""
    whole = head + rest
    first = cut(head[:TAIL_BYTES], 0, TAIL_BYTES, final=True).pieces[0]
    assert cut(whole, 0, len(whole), final=True).pieces[0] == first


@pytest.mark.parametrize("unit", [b"x", b" ", b"\n", b"7", b"!", b"\xe2", b"\x80", b"'", "日".encode(), "—".encode()])
def test_endless_run(unit: bytes) -> None:
    """A stream without a natural cut is cut all the same, and carries fewer than TAIL_BYTES bytes."""
    data = unit * 1000
    parts = list(cut_blocks(data, final=False))
    assert len(data) - parts[-1].stop < TAIL_BYTES
