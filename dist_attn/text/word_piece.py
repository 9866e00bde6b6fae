"""WordPiece as BERT has it, over a stream: the tokens of the `tokenizers` library, cut between words.

Words end at blanks, at punctuation and around Chinese characters, and what normalisation does to a character does not
depend on its neighbours. So text may be cut behind any such character, and the words on both sides keep their tokens. A
run of more than MAX_WORD characters without one is cut there; the library makes one unknown token of any word of more
than 100. Case, accents and blanks are lost in the tokens: `decode` writes words with a blank between them.

Reference: Wu et al. 2016, Sec. 4.1 (word pieces); Devlin et al. 2019.
"""

import re
from itertools import chain, pairwise
from typing import Any
from typing import final as final_class

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ModelFolderError
from dist_attn.text.base import WORD_TAIL_BYTES, Bytes, Tokens, check_bytes
from dist_attn.text.foreign import NOT_UTF8, ForeignTokeniser, byte_ends, ids_of

__all__ = ["MAX_WORD", "WordPieceTokeniser"]

_CUT_OFF = 3  # characters at the end of the bytes that may be the beginning of one that goes on
MAX_WORD = WORD_TAIL_BYTES // 4 - _CUT_OFF
_BLOCK_BYTES = 1 << 16
_PREFIX = "##"

_BLANKS = " \t\n\r\u00a0\u2000-\u200a\u3000"
_MARKS = r"!-/:-@\[-`{-~" + "\u2010-\u2027\u3001-\u3003\u3008-\u3011\uff01-\uff03\uff05-\uff0a\uff0c-\uff0f"
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"


@final_class
class WordPieceTokeniser(ForeignTokeniser):
    """A WordPiece tokeniser behind BERT's normaliser and its cut into words; unknown words become the unknown token."""

    supported = "WordPiece as of BERT: a BertNormalizer, a BertPreTokenizer, pieces that go on with ##"

    def __init__(self, contents: dict[str, Any], end_text: str | None, *more: Any, **options: Any) -> None:
        super().__init__(contents, end_text, *more, **options)
        chinese = _CHINESE if contents["normalizer"].get("handle_chinese_chars", True) else ""
        self._inside = re.compile(f"[^{_BLANKS}{_MARKS}{chinese}]")
        self._long = re.compile(f"{self._inside.pattern}{{{MAX_WORD}}}")

    def frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the file puts before and behind every text.

        Raises: ModelFolderError for a post_processor that does more than that.
        """
        step = self._contents.get("post_processor")
        match step:
            case None:
                return [], []
            case {"type": "BertProcessing", "cls": [_, int() as first], "sep": [_, int() as last]}:
                return [first], [last]
            case {"type": "TemplateProcessing", "single": [*parts], "special_tokens": dict() as special}:
                kinds = [next(iter(part)) for part in parts]
                if kinds.count("Sequence") == 1:
                    at = kinds.index("Sequence")
                    ids = [special[p["SpecialToken"]["id"]]["ids"] if "SpecialToken" in p else [] for p in parts]
                    return list(chain(*ids[:at])), list(chain(*ids[at + 1 :]))
        raise ModelFolderError(
            "tokenizer.json: its post_processor is not supported; supported are a TemplateProcessing or a "
            "BertProcessing, which put tokens before and behind a text"
        )

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """Encode the next piece of a stream; returns its tokens, and how many of its bytes they cover.

        The caller keeps `data[consumed:]`, at most WORD_TAIL_BYTES, and puts it in front of the next piece. With
        `final` every byte is consumed.

        Raises: TokenError if `data` is not bytes.
        """
        tokens, _, consumed = self.encode_with_ends(data, final=final)
        return tokens, consumed

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """Encode as `encode_piece`, and tell where in `data` each of the tokens ends."""
        check_bytes(data)
        ids, ends, size, start = [np.empty(0, np.int32)], [np.empty(0, np.int64)], len(data), 0
        while start < size:
            end = min(start + _BLOCK_BYTES, size)
            text = bytes(data[start:end]).decode("utf-8", "surrogateescape")
            if not (final and end == size):
                text = text[: self._decided(text)]
            if not text:
                break
            places = byte_ends(text) + start
            for begin, piece in self._cut(text):
                with self._in_library():
                    encoding = self._tokenizer.encode(NOT_UTF8.sub("\ufffd", piece), add_special_tokens=False)
                if encoding.ids:
                    ids.append(np.array(encoding.ids, dtype=np.int32))
                    ends.append(places[np.array(encoding.offsets)[:, 1] + (begin - 1)])
            start = int(places[-1])
        return np.concatenate(ids), np.concatenate(ends), start

    def decode(self, tokens: Tokens) -> bytes:
        """The words of the tokens, with a blank between them; nothing for special and unknown ones.

        Raises: TokenError for an id outside the vocabulary.
        """
        return super().decode(tokens).removeprefix(b" ")

    def _decided(self, text: str) -> int:
        """Count the characters of the words that nothing behind them can change."""
        last = len(text) - _CUT_OFF
        begin = last
        while begin > 0 and self._inside.match(text, begin - 1):
            begin -= 1
        return max(0, begin + (last - begin) // MAX_WORD * MAX_WORD)

    def _cut(self, text: str) -> list[tuple[int, str]]:
        """Cut a text where a run without any end of a word is too long; returns the parts with their places."""
        cuts = [0, *(match.end() for match in self._long.finditer(text)), len(text)]
        return [(a, text[a:b]) for a, b in pairwise(cuts) if b > a]

    @staticmethod
    def _check(contents: dict[str, Any]) -> None:
        """Raises: ValueError or KeyError for anything that would give other tokens than ours."""
        model, normaliser, cut = contents["model"], contents["normalizer"], contents["pre_tokenizer"]
        if model["type"] != "WordPiece" or model.get("continuing_subword_prefix", _PREFIX) != _PREFIX:
            raise ValueError(f"its model is {model['type']} with {model.get('continuing_subword_prefix')!r}")
        for step, kind in ((normaliser, "BertNormalizer"), (cut, "BertPreTokenizer")):
            if (step or {}).get("type") != kind:
                raise ValueError(f"it has {(step or {}).get('type', 'nothing')} in place of a {kind}")
        if model["unk_token"] not in model["vocab"]:
            raise ValueError(f"its unknown token {model['unk_token']!r} is not in the vocabulary")

    @staticmethod
    def _table(contents: dict[str, Any]) -> tuple[bytes, ...]:
        """The bytes that `decode` writes for every id: pieces that begin a word have a blank before them."""
        special = {int(token["id"]) for token in contents["added_tokens"] if token["special"]}
        vocab, unknown = ids_of(contents), contents["model"]["unk_token"]
        added = {token["content"]: int(token["id"]) for token in contents["added_tokens"]}
        pieces = [b""] * (max([*vocab.values(), *added.values()]) + 1)
        for text, number in (added | vocab).items():
            if number not in special and text != unknown:
                pieces[number] = text[len(_PREFIX) :].encode() if text.startswith(_PREFIX) else f" {text}".encode()
        return tuple(pieces)
