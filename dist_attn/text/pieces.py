r"""The places where a byte stream may be cut before BPE: words, numbers, punctuation, line ends and runs of blanks.

Every alternative is capped in length and none looks behind, so a match that starts at `s` is decided by
`data[s : s + TAIL_BYTES]` alone. Hence the rule for streams: cut at `s` only once TAIL_BYTES bytes from `s` on
are there, or the text has ended. Text without blanks cannot grow a buffer, and where an upload was split
cannot change a token.

Bytes from 0x80 on count as letters, except the three-byte characters that start with 0xE2 (U+2000 to U+2FFF):
these are dashes, curly quotes and symbols. `don't`, `she'd`, `cat's` are cut before the apostrophe, straight or
curly; other apostrophes are punctuation.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from dist_attn.text.base import TAIL_BYTES, Bytes, check_bytes

__all__ = ["MAX_PIECE_BYTES", "PATTERN", "TEXT_PATTERN", "Cut", "cut", "cut_blocks"]

PATTERN = (
    rb" ?[A-Za-z\x80-\xe1\xe3-\xff]{1,24}"
    rb"|(?:'|\xe2\x80\x99)(?:[dmst]|ll|re|ve)(?![A-Za-z\x80-\xe1\xe3-\xff])"
    rb"| ?[0-9]{1,3}"
    rb"| ?(?:[^A-Za-z0-9 \t\r\n\x80-\xff]|\xe2[\x80-\xbf]{0,2}){1,8}"
    rb"|[\r\n]{1,8}"
    rb"|\t{1,8}"
    rb"| {1,15}(?= )"
    rb"| "
)

# The same cut for characters, in the syntax of the `tokenizers` library, for other programs that read tokenizer.json.
# It differs from PATTERN only where the caps meet text that is not ASCII.
TEXT_PATTERN = (
    r" ?[^\x00-@\[-`{-\x7f\x{2000}-\x{2fff}]{1,24}"
    r"|['\x{2019}](?:[dmst]|ll|re|ve)(?![^\x00-@\[-`{-\x7f\x{2000}-\x{2fff}])"
    r"| ?[0-9]{1,3}"
    r"| ?(?:[\x00-\x7f\x{2000}-\x{2fff}&&[^A-Za-z0-9 \t\r\n]]){1,8}"
    r"|[\r\n]{1,8}"
    r"|\t{1,8}"
    r"| {1,15}(?= )"
    r"| "
)

MAX_PIECE_BYTES = 25
"""The bytes of the longest piece: a blank and a word of 24 bytes, or a blank and eight three-byte characters."""

# `findall` keeps the interpreter lock: blocks of this size give it back every few milliseconds.
_BLOCK_BYTES = 1 << 16

_find_pieces = re.compile(PATTERN).findall


class Cut(NamedTuple):
    """The pieces of `data[start:stop]`, where `stop` is as far as the bytes given can decide."""

    pieces: list[bytes]
    stop: int


def cut(data: Bytes, start: int, end: int, *, final: bool) -> Cut:
    """Cut `data[start:end]` into pieces; without `final`, fewer than TAIL_BYTES at the end stay uncut."""
    pieces: list[bytes] = _find_pieces(data, start, end)
    stop = end
    if not final:
        while pieces and stop - len(pieces[-1]) > end - TAIL_BYTES:
            stop -= len(pieces.pop())
    return Cut(pieces, stop)


def cut_blocks(data: Bytes, *, final: bool) -> Iterator[Cut]:
    """Cut a text of any length block by block, so that the pieces in memory at one time stay few.

    Raises: TokenError if `data` is not bytes.
    """
    check_bytes(data)
    size, start = len(data), 0
    while start < size:
        end = min(start + _BLOCK_BYTES, size)
        part = cut(data, start, end, final=final and end == size)
        yield part
        start = part.stop
        if end == size:
            break
