"""Marks of a text: tokenising that begins again at any of them gives the tokens that follow there."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dist_attn_service.text.tokenising import Piece, TextMark, TextMarks, ThreadTokeniser

from dist_attn.text import ByteTokeniser, Tokeniser
from tests.support.tokenisers import PROSE, foreign_bpe, small_bpe, unigram

TEXT = (PROSE + "  ünïcode — “quoted” 😀   12345\n\n").encode() * 4


async def blocks(data: bytes, size: int) -> AsyncIterator[bytes]:
    """The bytes in blocks."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("tokeniser", [ByteTokeniser(), small_bpe(), foreign_bpe(), unigram()])
@pytest.mark.parametrize("size", [61, 1000])
def test_tokenising_begins_again_at_any_mark(tokeniser: Tokeniser, size: int) -> None:
    """The same tokens and lengths behind each mark, however the rest is cut; lengths add up to the bytes before it."""

    async def work(port: ThreadTokeniser) -> None:
        whole = [piece async for piece in port.pieces(blocks(TEXT, size))]
        tokens, lengths = joined(whole)
        assert len(whole) > 3 and whole[-1].mark.byte == len(TEXT)
        for mark in [TextMark(), *(piece.mark for piece in whole[:: max(1, len(whole) // 5)])]:
            assert lengths[: mark.tokens].sum() == mark.byte - mark.gap
            again = [piece async for piece in port.pieces(blocks(TEXT[mark.byte :], size + 7), mark)]
            rest, spans = joined(again)
            np.testing.assert_array_equal(rest, tokens[mark.tokens :])
            np.testing.assert_array_equal(spans, lengths[mark.tokens :])

    with ThreadPoolExecutor(1) as threads:
        asyncio.run(work(ThreadTokeniser(tokeniser, threads)))


def joined(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """All tokens and all lengths."""
    empty = np.empty(0, np.int64)
    return (
        np.concatenate([empty, *(piece.tokens for piece in pieces)]),
        np.concatenate([empty, *(piece.byte_lengths for piece in pieces)]),
    )


def test_the_last_mark_before_a_position() -> None:
    """The last one at or before it, the beginning where there is none; earlier ones are let go of."""
    marks = TextMarks()
    for tokens in (10, 20, 30):
        marks.push(TextMark(tokens, 4 * tokens))
    assert [marks.before(position).tokens for position in (5, 10, 29, 30, 1000)] == [0, 10, 20, 30, 30]
    assert TextMarks(TextMark(7, 8)).before(9) == TextMark(7, 8)
