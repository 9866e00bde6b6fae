"""WordPiece: the library's tokens, wherever a stream is cut, and where they stand in the bytes."""

import json
import re
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text import WORD_TAIL_BYTES, WordPieceTokeniser
from dist_attn.text.word_piece import MAX_WORD
from tests.support.examples import examples
from tests.support.sentence_encoders import word_piece_contents
from tests.support.tokenisers import PROSE

RUNS = st.builds(lambda unit, times: unit * times, st.text(min_size=1, max_size=3), st.integers(1, 300))
SLICES = st.builds(lambda a, b: PROSE[a : a + b], st.integers(0, 400), st.integers(0, 200))
TEXTS = st.lists(st.one_of(st.text(max_size=40), RUNS, SLICES), max_size=5).map("".join)
BYTES = st.builds(lambda text, noise, more: text.encode() + noise + more.encode(), TEXTS, st.binary(max_size=9), TEXTS)


@cache
def tokeniser(lowercase: bool = True) -> WordPieceTokeniser:
    """The tokeniser of `word_piece_contents`."""
    return WordPieceTokeniser(json.loads(word_piece_contents(lowercase=lowercase)), None)


@cache
def library(lowercase: bool = True) -> Tokenizer:
    """The same in the library, without the tokens that text could become."""
    contents = json.loads(word_piece_contents(lowercase=lowercase)) | {"added_tokens": [], "post_processor": None}
    return Tokenizer.from_str(json.dumps(contents))


def _has_no_endless_word(text: str) -> bool:
    """Characters that normalisation takes out neither end a word nor make it shorter: only blanks that stay do."""
    return all(len(word) < MAX_WORD for word in re.split("[ \t\n\r\u00a0\u2000-\u200a\u3000]", text))


@pytest.mark.parametrize("lowercase", [True, False])
@examples(60)
@example(text="0\x1f" + "0" * 50)
@example(text="\x1f\x1f" + "0" * (MAX_WORD - 3))
@given(text=TEXTS.filter(_has_no_endless_word))
def test_tokens_are_those_of_the_library(lowercase: bool, text: str) -> None:
    """Text without endless words has exactly the library's tokens, in any script, cased or not."""
    assert tokeniser(lowercase).encode(text.encode()).tolist() == library(lowercase).encode(text).ids


@pytest.mark.parametrize("unit", ["日本語、", "word,", "a\u00a0b\u2014", "é "])
def test_long_text_without_blanks(unit: str) -> None:
    """Chinese, punctuation and blanks of all kinds end words, so such text is never cut wrongly, however long."""
    text = unit * 12_000
    assert tokeniser().encode(text.encode()).tolist() == library().encode(text).ids


@examples(60)
@given(data=BYTES, cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_split_anywhere(data: bytes, cuts: list[int]) -> None:
    """However a stream is split, tokens and the places where they end are those of the whole; little is carried."""
    want, want_ends, _ = tokeniser().encode_with_ends(data, final=True)
    tokens, ends, start, stop = [], [], 0, 0
    for stop in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        found, places, consumed = tokeniser().encode_with_ends(data[start:stop], final=False)
        tokens.append(found)
        ends.append(places + start)
        start += consumed
        assert stop - start <= WORD_TAIL_BYTES
    found, places, consumed = tokeniser().encode_with_ends(data[start:], final=True)
    assert start + consumed == len(data)
    np.testing.assert_array_equal(np.concatenate([*tokens, found]), want)
    np.testing.assert_array_equal(np.concatenate([*ends, places + start]), want_ends)


def test_places_are_those_of_the_words() -> None:
    """Tokens end where their words do in the bytes, which blanks, accents and bytes that are no UTF-8 do not shift."""
    data = "  It   was é ".encode() + b"\xff" + b" the x"
    tokens, ends, consumed = tokeniser().encode_with_ends(data, final=True)
    words = [data[a:b].split()[-1] for a, b in pairwise([0, *ends.tolist()])]
    assert b"".join(words).decode(errors="replace").replace("\ufffd", "") == "Itwaséthex"
    assert consumed == len(data)
    assert tokeniser().decode(tokens) == b"it was e the x"


def test_endless_words_are_cut() -> None:
    """A word longer than the longest is unknown in pieces of that length, in a stream as in the whole."""
    unknown = library().token_to_id("[UNK]")
    assert tokeniser().encode(b"q" * (3 * MAX_WORD)).tolist() == [unknown] * 3
    _, consumed = tokeniser().encode_piece(b"q" * 100_000, final=False)
    assert 100_000 - consumed <= WORD_TAIL_BYTES


def test_text_never_becomes_special() -> None:
    """The names of special tokens are words and brackets like any other text; they stand around it by the template."""
    special = {library().token_to_id(name) for name in ("[CLS]", "[SEP]", "[MASK]")}
    assert not special & set(tokeniser().encode(b"[CLS] [MASK][SEP]").tolist())
    before, behind = tokeniser().frame()
    assert (before, behind) == ([library().token_to_id("[CLS]")], [library().token_to_id("[SEP]")])
    contents = json.loads(word_piece_contents())
    other = {"type": "BertProcessing", "cls": ["[CLS]", 7], "sep": ["[SEP]", 8]}
    assert WordPieceTokeniser(contents | {"post_processor": other}, None).frame() == ([7], [8])
    assert WordPieceTokeniser(contents | {"post_processor": None}, None).frame() == ([], [])


def test_other_kinds_are_refused() -> None:
    """Another normaliser, cut or prefix is refused with what it is and what is supported."""
    contents = json.loads(word_piece_contents())
    for change, message in (
        (
            {"normalizer": {"type": "NFKC"}},
            "it has NFKC in place of a BertNormalizer; supported is WordPiece as of BERT",
        ),
        ({"pre_tokenizer": None}, "it has nothing in place of a BertPreTokenizer"),
        ({"model": contents["model"] | {"continuing_subword_prefix": "@@"}}, "WordPiece with '@@'"),
    ):
        with pytest.raises(ModelFolderError, match=message):
            WordPieceTokeniser(contents | change, None)
