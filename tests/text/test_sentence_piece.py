"""SentencePiece with byte fallback: the library's tokens behind a blank, and refusals that say why."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text import SentencePieceTokeniser
from dist_attn.text.foreign import MAX_PIECE_BYTES
from tests.support.tokenisers import PROSE, sentence_piece, sentence_piece_contents

HARD = PROSE + "  \n\n \t x\u00a0y 12345 a" + " " * 20 + "b\u3000\u65e5\u672c\r\n'S IT'LL \u00e9 \U0001f600" * 3
KINDS = [("BPE", False), ("BPE", True), ("Unigram", False), ("Unigram", True)]


@pytest.mark.parametrize(("kind", "metaspace"), KINDS)
def test_tokens_are_those_of_the_library(kind: str, metaspace: bool) -> None:
    """Text behind a blank has exactly the tokens that the library gives it, which puts that blank there by itself."""
    library = Tokenizer.from_str(sentence_piece_contents(kind, metaspace))
    tokens = sentence_piece(kind, metaspace).encode(b" " + HARD.encode())
    assert tokens.tolist() == library.encode(HARD, add_special_tokens=False).ids
    assert sentence_piece(kind, metaspace).decode(tokens) == b" " + HARD.encode()


@pytest.mark.parametrize(("kind", "metaspace"), KINDS)
def test_what_the_file_has_no_token_for_comes_back(kind: str, metaspace: bool) -> None:
    """Bytes that are no UTF-8, unknown characters and the blank's own character come back as they were."""
    data = b"a \xff\xfe " + "\u2581 \u2581x \U0001f984 <0x41> </s>".encode() + b" \xe2\x96"
    tokeniser = sentence_piece(kind, metaspace)
    tokens = tokeniser.encode(data)
    assert tokeniser.decode(tokens) == data
    assert not {0, 1, 2} & set(tokens.tolist())


def test_long_pieces_are_cut_between_characters() -> None:
    """A run without blanks is cut at the longest piece, never inside a character."""
    tokeniser, text = sentence_piece("BPE", False), "\u65e5" * 100
    tokens = tokeniser.encode(text.encode())
    first = text.encode()[: MAX_PIECE_BYTES // 3 * 3]
    assert tokens[: len(tokeniser.encode(first))].tolist() == tokeniser.encode(first).tolist()
    assert tokeniser.decode(tokens) == text.encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "NFKC"}}, "its normalizer is NFKC, which changes text for good; supported is BPE or"),
        ({"normalizer": None}, "nothing in it makes blanks tokens"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "its pre_tokenizer is Whitespace"),
        ({"model": {"type": "Unigram", "vocab": []}}, "its model is Unigram without byte fallback"),
        ({"model": {"type": "BPE", "vocab": {"<0x41>": 0}, "byte_fallback": True}}, "255 of the 256 bytes have no"),
    ],
)
def test_other_kinds_are_refused(change: dict[str, Any], message: str) -> None:
    """A file that would lose bytes or give other tokens is refused with what it is and what is supported."""
    contents = json.loads(sentence_piece_contents("BPE", False)) | change
    with pytest.raises(ModelFolderError, match=message):
        SentencePieceTokeniser(contents, None)


def test_a_token_that_reaches_over_a_blank_is_refused() -> None:
    """Where a token holds the end of a word and the next one's beginning, no cut would be right."""
    contents = json.loads(sentence_piece_contents("BPE", False))
    model = contents["model"]
    model["vocab"]["t\u2581w"] = len(model["vocab"])
    with pytest.raises(ModelFolderError, match="its token 't\u2581w' reaches over a blank"):
        SentencePieceTokeniser(contents, None)
