"""Byte-level BPE of other programs: their tokens, a bounded cut, and refusals."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text import ByteLevelTokeniser, load_tokeniser
from dist_attn.text.foreign import MAX_PIECE_BYTES
from tests.support.tokenisers import LLAMA_PATTERN, PROSE, foreign_bpe, foreign_contents

HARD = PROSE + "  \n\n \t x\u00a0y 12345 a" + " " * 40 + "b\u3000\u65e5\u672c\r\n'S IT'LL \u00e9" * 3


@pytest.mark.parametrize("pattern", [None, LLAMA_PATTERN])
def test_tokens_are_those_of_the_library(pattern: str | None) -> None:
    """Text whose pieces fit has exactly the tokens that the `tokenizers` library gives it."""
    library = Tokenizer.from_str(foreign_contents(pattern))
    assert foreign_bpe(pattern).encode(HARD.encode()).tolist() == library.encode(HARD).ids


def test_long_pieces_are_cut_between_characters() -> None:
    """A run longer than the longest piece is cut at it, never inside a character, and comes back whole."""
    tokeniser, text = foreign_bpe(), "\u65e5" * 100
    tokens = tokeniser.encode(text.encode())
    assert tokeniser.decode(tokens) == text.encode()
    first = text.encode()[: MAX_PIECE_BYTES // 3 * 3]
    assert tokens[: len(tokeniser.encode(first))].tolist() == tokeniser.encode(first).tolist()


def test_special_and_unused_ids_stand_for_no_bytes(tmp_path: Path) -> None:
    """Padding adds ids without bytes; a folder gives back tokens and end token; a stream's text is never special."""
    tokeniser = foreign_bpe().padded(384)
    assert tokeniser.vocab_size == 384
    assert tokeniser.decode([0, 383]) == b""
    tokeniser.save(tmp_path)
    again = load_tokeniser(tmp_path)
    assert (again.vocab_size, again.end_token) == (350, 0)
    assert again.digest == tokeniser.digest
    tokens = again.encode(b"<|endoftext|>")
    assert 0 not in tokens
    assert again.decode(tokens) == b"<|endoftext|>"
    with pytest.raises(ModelFolderError, match=r"384 tokens and config\.json says vocab_size 300"):
        tokeniser.padded(300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {}}}, "its model is WordLevel; supported is byte-level BPE"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "its pre_tokenizer is Metaspace"),
        ({"pre_tokenizer": None}, "its pre_tokenizer is missing"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}}, "by none"),
    ],
)
def test_other_kinds_are_refused(change: dict[str, object], message: str) -> None:
    """A tokeniser whose tokens would not be ours is refused with what it is and what is supported."""
    contents = json.loads(foreign_contents()) | change
    with pytest.raises(ModelFolderError, match=message):
        ByteLevelTokeniser(contents, None)


def test_an_added_token_of_an_impossible_id_is_refused() -> None:
    """Before a table with a place for every id is made."""
    contents = json.loads(foreign_contents())
    contents["added_tokens"][0]["id"] = (1 << 32) - 1
    with pytest.raises(ModelFolderError, match="ids run to 4294967295"):
        ByteLevelTokeniser(contents, "<|endoftext|>")
