"""What BPE adds to the contract: learning, the file for other programs, and what a folder may hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from dist_attn.errors import InputError, ModelFolderError, TokenError
from dist_attn.text import BpeTokeniser, ByteTokeniser, load_tokeniser, train_bpe
from dist_attn.text import bpe as bpe_module
from tests.support.tokenisers import PROSE, small_bpe


def test_learns_words(tmp_path: Path) -> None:
    """Frequent words become single tokens, and the vocabulary has the size that was asked for."""
    tokeniser = small_bpe()
    assert tokeniser.vocab_size == 400
    assert [tokeniser.decode([int(t)]) for t in tokeniser.encode(b"it was the age")] == [
        b"it",
        b" was",
        b" the",
        b" age",
    ]


def test_same_files_same_ids(tmp_path: Path) -> None:
    """Training twice gives the same merges and digest; other merges have another digest."""
    path = tmp_path / "prose.txt"
    path.write_bytes(PROSE.encode())
    again = train_bpe([path], 400)
    assert (again.merges, again.digest) == (small_bpe().merges, small_bpe().digest)
    assert train_bpe([path], 399).digest != again.digest


def test_counts_decide(tmp_path: Path) -> None:
    """A pair that occurs often is learnt before one that occurs in more distinct words but less often."""
    path = tmp_path / "text.txt"
    path.write_bytes(b" qz" * 5000 + b" abc abd abe abf")
    assert b"".join(train_bpe([path], 300).merges[1]) == b" qz"


def test_ids_start_with_the_bytes() -> None:
    """Ids 0 to 255 are the bytes themselves."""
    assert small_bpe().decode(range(256)) == bytes(range(256))


def test_files_are_separate(tmp_path: Path) -> None:
    """No piece reaches over the end of a file."""
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_bytes(b"xy xy on")
    paths[1].write_bytes(b"ly xy xy")
    assert b"only" not in {a + b for a, b in train_bpe(paths, 300).merges}


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [(b"abab", 257, "give 258 or more"), (b"", 300, "nothing repeats"), (None, 300, "cannot be read")],
)
def test_training_refuses(tmp_path: Path, text: bytes | None, size: int, message: str) -> None:
    """Too small a vocabulary, text without repetition and a missing file are refused in words."""
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        train_bpe([path], size)


def test_the_smallest_vocabulary_has_one_merge(tmp_path: Path) -> None:
    """258 tokens are the bytes, one merge and the end."""
    (tmp_path / "text.txt").write_bytes(b"abab abab")
    assert train_bpe([tmp_path / "text.txt"], 258).merges == ((b"a", b"b"),)


def test_merges_are_checked() -> None:
    """Merges that build on nothing, or none at all, are refused."""
    with pytest.raises(TokenError, match="at least one merge"):
        BpeTokeniser(())
    with pytest.raises(TokenError, match="merge 0 joins"):
        BpeTokeniser(((b"ab", b"c"),))


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    """The `tokenizers` library reads our tokenizer.json and finds the same tokens in prose."""
    small_bpe().save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = small_bpe().encode(PROSE.encode())
    assert theirs.encode(PROSE).ids == ours.tolist()
    assert theirs.decode(ours.tolist()) == PROSE
    assert theirs.token_to_id("<|end|>") == small_bpe().end_token


def test_byte_file_is_read_by_other_programs(tmp_path: Path) -> None:
    """The byte tokeniser's file gives the same tokens in the `tokenizers` library."""
    ByteTokeniser().save(tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(PROSE).ids == list(PROSE.encode())


def test_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that overflows all the time changes no token."""
    expected = small_bpe().encode(PROSE.encode())
    monkeypatch.setattr(bpe_module, "_CACHE_ENTRIES", 3)
    np.testing.assert_array_equal(BpeTokeniser(small_bpe().merges).encode(PROSE.encode()), expected)


def test_missing_file(tmp_path: Path) -> None:
    """A folder without tokenizer.json is refused with the file's name."""
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json cannot be read \(No such file"):
        load_tokeniser(tmp_path)


def _drop_model(contents: dict[str, Any]) -> None:
    del contents["model"]


def _word_piece(contents: dict[str, Any]) -> None:
    contents["model"]["type"] = "WordPiece"


def _other_pattern(contents: dict[str, Any]) -> None:
    contents["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"


def _no_pattern(contents: dict[str, Any]) -> None:
    contents["pre_tokenizer"]["pretokenizers"] = []


def _gap(contents: dict[str, Any]) -> None:
    contents["model"]["vocab"]["a"] = 999


def _swap(contents: dict[str, Any]) -> None:
    vocab = contents["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _no_end(contents: dict[str, Any]) -> None:
    del contents["model"]["vocab"]["<|end|>"]


def _strange_merge(contents: dict[str, Any]) -> None:
    contents["model"]["merges"][0] = ["qq", "qq"]


@pytest.mark.parametrize(
    "spoil",
    [_drop_model, _word_piece, _other_pattern, _no_pattern, _gap, _swap, _no_end, _strange_merge],
    ids=lambda f: f.__name__,
)
def test_other_kinds(tmp_path: Path, spoil: Callable[[dict[str, Any]], None]) -> None:
    """A tokenizer.json of another kind, or a damaged one, is refused with its path and the reason."""
    small_bpe().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_bytes())
    spoil(contents)
    path.write_text(json.dumps(contents))
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json (is|cuts)"):
        load_tokeniser(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[1, 2]", b"{", b'{"model": 3}', b"\xff\xfe"])
def test_not_a_tokeniser(tmp_path: Path, text: bytes) -> None:
    """A file that is no tokeniser at all is refused with its path."""
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json (is not|holds no)"):
        load_tokeniser(tmp_path)
