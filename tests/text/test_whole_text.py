"""Tokenisers of downloaded folders: whole texts have transformers' ids, and tokens one by one the library's text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from dist_attn.errors import ModelFolderError, TokenError, TokeniserError
from dist_attn.text import (
    ByteLevelTokeniser,
    ForeignTokeniser,
    IncrementalDecoder,
    LibraryTokeniser,
    Tokeniser,
    fitted,
    read_foreign,
)
from dist_attn.text.library import MOST_BYTES
from tests.support.tokenisers import FAILS_AT, PROSE, downloaded_contents, failing_contents

KINDS = ("llama3", "llama2", "gemma", "deepseek", "t5")
FIRST = {"__type": "AddedToken", "special": True, "content": "<first>"}
WHOLE_ALONE = ("gemma", "deepseek", "t5")
TEXTS = (
    PROSE[:500],
    "",
    " ",
    "   leading blanks, and at the end  ",
    "e\u0301 n\u0303 \ufb01 e\u0301\u0323",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u65e5\u672c\u8a9e 123 4567",
    "<s>x</s> y <|endoftext|><tool> z\n\n<|bos|>",
    "\u2581 and <0x41>\t\r\n",
)


def folder_of(folder: Path, kind: str, **about: Any) -> Path:
    """A folder with the files of a downloaded tokeniser."""
    (folder / "tokenizer.json").write_text(downloaded_contents(kind))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **about}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokeniser, Tokenizer]:
    """A tokeniser of each kind, ours and the library's."""
    folder = folder_of(tmp_path_factory.mktemp(request.param), request.param)
    return read_foreign(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "about",
    [
        {},
        {"add_bos_token": False, "bos_token": "<s>", "eos_token": "<brand new>"},
        {"add_bos_token": True, "add_eos_token": True, "bos_token": FIRST, "eos_token": "<last>"},
    ],
)
def test_whole_texts_have_the_ids_of_transformers(kind: str, about: dict[str, Any], tmp_path: Path) -> None:
    """Normalised, framed or not, with the special tokens of tokenizer_config.json, the ids are AutoTokenizer's."""
    tokeniser, theirs = read_foreign(folder_of(tmp_path, kind, **about)), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "a<brand new> b <first>c<last>"):
        for framed in (True, False):
            wanted = theirs(text, add_special_tokens=framed)["input_ids"]
            assert tokeniser.encode_whole(text.encode(), framed=framed).tolist() == wanted, text
    assert tokeniser.vocab_size == len(theirs)
    assert tokeniser.end_token == theirs.eos_token_id
    assert isinstance(tokeniser, LibraryTokeniser) == (kind in WHOLE_ALONE)


def test_parts_are_read_as_one_text_whose_special_tokens_are_told(both: tuple[Tokeniser, Tokenizer]) -> None:
    """Special tokens between texts give the ids of the whole text; their names inside of a text are no tokens."""
    tokeniser, theirs = both
    for text, number in tokeniser.special_tokens.items() - {("<unk>", 0)}:
        whole = f"{text}user\n Hello{text} <tool>x{text}\n"
        parts: list[str | int] = [number, "user\n Hello", number, " <tool>x", number, "\n"]
        wanted = theirs.encode(whole, add_special_tokens=False).ids
        assert tokeniser.encode_parts(parts).tolist() == wanted
        said = tokeniser.encode_parts(["we say ", f"{text} here \ufdd0{number}\ufdd0"])
        assert number not in said.tolist()


def test_parts_with_tokens_that_take_the_blanks_beside_them() -> None:
    """Added tokens that swallow blanks or are normalised have the ids of the whole text, special ones and others."""
    contents = json.loads(downloaded_contents("llama3"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = 1 + max(token["id"] for token in contents["added_tokens"])
    more = ({"content": "<|end|>", "lstrip": True, "rstrip": True}, {"content": "trail", "rstrip": True})
    more += ({"content": "word", "special": False, "single_word": True, "normalized": True, "lstrip": True},)
    contents["added_tokens"] += [flags | token | {"id": first + at} for at, token in enumerate(more)]
    tokeniser, theirs = LibraryTokeniser(contents, None), Tokenizer.from_str(json.dumps(contents))
    parts: list[str | int] = ["a word  b  ", first, " \n it  word", first + 1, "  x"]
    whole = theirs.encode("a word  b  <|end|> \n it  wordtrail  x", add_special_tokens=False).ids
    assert tokeniser.encode_parts(parts).tolist() == whole


def test_added_tokens_that_the_model_has_not(tmp_path: Path) -> None:
    """Files with added tokens beyond the model's are taken; a text that holds one is refused, with its id."""
    contents = json.loads(downloaded_contents("gemma"))
    size = 1 + max(token["id"] for token in contents["added_tokens"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    contents["added_tokens"].append(flags | {"id": size, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    tokeniser = fitted(read_foreign(tmp_path), tmp_path, size)
    assert tokeniser.vocab_size == size
    assert decoded(tokeniser, tokeniser.encode_whole(b"a text", framed=True).tolist()) == "a text"
    assert tokeniser.encode_parts(["an <image>"]).max() < size
    for refused in (lambda: tokeniser.encode_whole(b"<image>", framed=False), lambda: tokeniser.encode_parts([size])):
        with pytest.raises(TokenError, match=f"'<image>' with id {size}, and the model's ids run to {size - 1}; leave"):
            refused()
    contents["model"]["vocab"]["<image>"] = size  # streams may give it then
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(ModelFolderError, match="the files are of two models"):
        fitted(read_foreign(tmp_path), tmp_path, size)


def decoded(tokeniser: Tokeniser, tokens: list[int]) -> str:
    """The text of the tokens, one by one."""
    decoder = IncrementalDecoder(tokeniser, begins=True)
    return "".join(map(decoder.push, tokens)) + decoder.finish()


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.WordPiece(cleanup=False)])
def test_words_have_the_blanks_of_the_library(decoder: decoders.Decoder | None) -> None:
    """Tokens that are words come one by one with the blanks that the library puts between them, or takes away."""
    library = Tokenizer(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.train_from_iterator(
        [PROSE], trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", "<s>"], show_progress=False)
    )
    if decoder is not None:
        library.decoder = decoder
    tokeniser = LibraryTokeniser(json.loads(library.to_str()), None)
    for text in (PROSE[:300], "I don't know , said he ! do not", "", "<s>it<s>is<s>"):
        tokens = library.encode(text).ids
        assert decoded(tokeniser, tokens) == library.decode(tokens, skip_special_tokens=True)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_tokens_one_by_one_give_the_librarys_text(both: tuple[Tokeniser, Tokenizer], data: st.DataObject) -> None:
    """Any ids, and those of texts, give piece by piece what the library decodes of all, special tokens left out."""
    tokeniser, theirs = both
    pieces = st.lists(st.integers(0, theirs.get_vocab_size() - 1), max_size=12)
    text = st.text(max_size=12) | st.sampled_from(TEXTS)
    tokens: list[int] = []
    for part in data.draw(st.lists(pieces | text, max_size=4)):
        tokens += theirs.encode(part).ids if isinstance(part, str) else part
    assert decoded(tokeniser, tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_a_stream_of_a_kind_without_a_cut(tmp_path: Path) -> None:
    """Its tokens come at the end of a text, with where they end; a text that is too long for that is refused."""
    tokeniser = read_foreign(folder_of(tmp_path, "deepseek"))
    text = "\u65e5\u672c \U0001f642 12\n".encode() + b"\xff\xc3" + b"end"
    tokens, ends, consumed = tokeniser.encode_with_ends(text[:5], final=False)
    assert (len(tokens), len(ends), consumed) == (0, 0, 0)
    tokens, ends, consumed = tokeniser.encode_with_ends(text, final=True)
    assert (consumed, ends[-1]) == (len(text), len(text))
    assert (np.diff(ends) >= 0).all()
    assert tokeniser.decode(tokens).decode() == text.decode(errors="replace")
    with pytest.raises(TokenError, match="send shorter texts, or tokens"):
        tokeniser.encode_piece(bytes(MOST_BYTES + 1), final=False)


def test_a_file_that_the_library_does_not_read(tmp_path: Path) -> None:
    """A tokenizer.json with a model that there is not is refused in the library's words."""
    folder_of(tmp_path, "t5")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Soup"}}))
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: .*; supported is whatever the tokenizers library"):
        read_foreign(tmp_path)


def test_an_added_token_without_an_id(tmp_path: Path) -> None:
    """A key of added_tokens_decoder that is no number is refused as one of tokenizer_config.json."""
    folder_of(tmp_path, "llama3", added_tokens_decoder={"350": FIRST, "a": FIRST})
    with pytest.raises(ModelFolderError, match=r"tokenizer_config\.json: added_tokens_decoder has the key 'a'"):
        read_foreign(tmp_path)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
EVERYWHERE = {"type": "Replace", "pattern": {"Regex": "(?=)"}, "content": "x"}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "long": (
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 4}},
        "normalizer makes texts 100,000,000 t",
    ),
    "often": ({"normalizer": {"type": "Sequence", "normalizers": [EVERYWHERE] * 40}}, "needed are at most 64"),
    "of tokens": (
        {"decoder": {"type": "Sequence", "decoders": [REPLACE] * 4}},
        "decoder makes texts 100,000,000 times",
    ),
    "an id": ({"model": {"vocab": {"zz": (1 << 32) - 1}}}, "ids run to 4294967295; needed are ids below 16777216"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_file_that_would_take_all_memory_is_refused(what: str, tmp_path: Path) -> None:
    """Texts and tokens that grow without an end in sight, and a table with a place for each of four billion ids."""
    path = folder_of(tmp_path, "llama3") / "tokenizer.json"
    contents, (changed, words) = json.loads(path.read_text()), BOMBS[what]
    model = contents["model"] | {"vocab": contents["model"]["vocab"] | changed.get("model", {}).get("vocab", {})}
    path.write_text(json.dumps({**contents, **changed, "model": model}))
    with pytest.raises(ModelFolderError, match=words):
        read_foreign(tmp_path)


def test_more_unused_ids_than_any_model_has_are_refused(tmp_path: Path) -> None:
    """A vocab_size of a million millions is no padding."""
    with pytest.raises(ModelFolderError, match="vocab_size 1000000000000; needed are at most 16777216"):
        read_foreign(folder_of(tmp_path, "llama3")).padded(10**12)


@pytest.mark.parametrize("kind", [ByteLevelTokeniser, LibraryTokeniser])
def test_a_text_at_which_the_library_panics(kind: type[ForeignTokeniser]) -> None:
    """However it is read, it is an error that names the file and says why; other texts are read as before."""
    tokeniser, data = kind(failing_contents(), None, "folder/tokenizer.json"), FAILS_AT.encode()
    for read in (
        lambda: tokeniser.encode_whole(data, framed=True),
        lambda: tokeniser.encode_parts([FAILS_AT]),
        lambda: tokeniser.encode_with_ends(data, final=True)[0],
    ):
        with pytest.raises(TokeniserError, match=r"^folder/tokenizer\.json cannot read this text: .*retry-limit"):
            read()
    assert tokeniser.decode(tokeniser.encode_whole(b"xyz", framed=False)) == b"xyz"
