"""SentencePiece with byte fallback, as tokenizer.json has it (Llama 2, Mistral), over a stream: cut before blanks.

No token reaches from a word over the blank behind it, so the merges of BPE and the likeliest path of Unigram never do,
and text may be cut before any blank that follows a word. A piece is blanks and the word behind them, decided by the
next TAIL_BYTES bytes and never longer than MAX_PIECE_BYTES, so where an upload was split cannot change a token. Any
bytes come back: what is no UTF-8, and the character that stands for blanks in the file, become tokens of single bytes;
names of special tokens are read like other text. The blank that these files put before a whole text is not put there,
since a piece of a stream does not know whether it is the first.

Reference: Kudo and Richardson 2018; Sennrich et al. 2016 (BPE); Kudo 2018 (Unigram).
"""

import re
from itertools import pairwise
from typing import Any
from typing import final as final_class

from dist_attn.text.base import TAIL_BYTES
from dist_attn.text.foreign import MAX_PIECE_BYTES, PiecewiseTokeniser, ids_of

_BLANK = "\u2581"
_ALONE = "\udc80-\udcff" + _BLANK  # bytes that are no UTF-8, and the character that a blank would be mistaken for
_WORDS = re.compile(f"[{_ALONE}]| *[^ {_ALONE}]+| +")
_WORDS_OF_ONE_BLANK = re.compile(f"[{_ALONE}]| ?[^ {_ALONE}]+| ")
_REACHES_OVER = re.compile(f"[^{_BLANK}]{_BLANK}")


@final_class
class SentencePieceTokeniser(PiecewiseTokeniser):
    """A tokeniser by BPE or Unigram over text in which blanks are a character of their own."""

    supported = "BPE or Unigram of SentencePiece with byte fallback, blanks as \u2581 and no other normaliser"

    def __init__(self, contents: dict[str, Any], end_text: str | None, *more: Any, **options: Any) -> None:
        super().__init__(contents, end_text, *more, **options)
        ids = ids_of(contents)
        self._byte_ids = [ids[_byte_token(value)] for value in range(256)]
        special = [re.escape(token["content"]) for token in contents["added_tokens"] if token["content"]]
        # The places of special names in a text; the library may know them as words: each is cut behind its first
        # character.
        self._names = re.compile("(?=" + "|".join(["<0x[0-9A-F]{2}>", *special]) + ")")
        self._pieces = _WORDS_OF_ONE_BLANK if _splits(contents) else _WORDS

    def _encode_block(self, data: bytes, final: bool, out: bytearray) -> int:
        """Append the tokens of the pieces that these bytes decide; returns how many bytes they cover."""
        last = len(data) if final else len(data) - TAIL_BYTES + 1  # no piece may start from here on
        start = 0
        for piece in self._pieces.findall(data.decode("utf-8", "surrogateescape")):
            for part in _parts(piece):
                if start >= last:
                    return start
                out += self._ids(part)
                start += len(part.encode("utf-8", "surrogateescape"))
        return start

    def _tokenise(self, piece: str) -> list[int]:
        if piece == _BLANK or "\udc80" <= piece <= "\udcff":
            return [self._byte_ids[value] for value in piece.encode("utf-8", "surrogateescape")]
        cuts = [0, *(match.start() + 1 for match in self._names.finditer(piece)), len(piece)]
        parts = [piece[a:b].replace(" ", _BLANK) for a, b in pairwise(cuts) if b > a]
        return [token.id for part in parts for token in self._tokenizer.model.tokenize(part)]

    @staticmethod
    def _check(contents: dict[str, Any]) -> None:
        """Raises: ValueError or KeyError for anything that would give other tokens than ours, or lose bytes."""
        model, ids = contents["model"], ids_of(contents)
        if model["type"] not in ("BPE", "Unigram"):
            raise ValueError(f"its model is {model['type']}, neither BPE nor Unigram")
        if not model.get("byte_fallback"):
            raise ValueError(f"its model is {model['type']} without byte fallback, so not every text would come back")
        if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError("its merges have dropout, a prefix or a suffix")
        if missing := [value for value in range(256) if _byte_token(value) not in ids]:
            raise ValueError(f"{len(missing)} of the 256 bytes have no token")
        replaces = False
        for step in _normalisers(contents.get("normalizer")):
            match step:
                case {"type": "Prepend", "prepend": "\u2581"}:
                    pass
                case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                    replaces = True
                case _:
                    raise ValueError(f"its normalizer is {step['type']}, which changes text for good")
        cut = contents.get("pre_tokenizer")
        if cut is not None and (cut["type"], cut.get("replacement")) != ("Metaspace", _BLANK):
            raise ValueError(f"its pre_tokenizer is {cut['type']}")
        if cut is None and not replaces:
            raise ValueError("nothing in it makes blanks tokens")
        if not _splits(contents):
            over = next((text for text in ids if _REACHES_OVER.search(text)), None)
            if over is not None:
                raise ValueError(f"its token {over!r} reaches over a blank, so text cannot be cut there")

    @staticmethod
    def _table(contents: dict[str, Any]) -> tuple[bytes, ...]:
        """The bytes of every id; none for special tokens and for numbers that no token has."""
        added, vocab = {int(token["id"]): token for token in contents["added_tokens"]}, ids_of(contents)
        pieces = [b""] * (max([*added, *vocab.values()]) + 1)
        for text, number in vocab.items():
            pieces[number] = text.replace(_BLANK, " ").encode()
        for number, token in added.items():
            pieces[number] = b"" if token["special"] else token["content"].encode()
        for value in range(256):
            pieces[vocab[_byte_token(value)]] = bytes([value])
        return tuple(pieces)


def _byte_token(value: int) -> str:
    return f"<0x{value:02X}>"


def _normalisers(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step["normalizers"]) if step["type"] == "Sequence" else [step]


def _splits(contents: dict[str, Any]) -> bool:
    """Return whether every blank begins a piece: the default of Metaspace."""
    cut = contents.get("pre_tokenizer")
    return cut is not None and bool(cut.get("split", True))


def _parts(piece: str) -> list[str]:
    """Return the piece, or where it is too long, parts of at most MAX_PIECE_BYTES that end between characters."""
    data = piece.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_PIECE_BYTES:
        return [piece]
    parts, start = [], 0
    while len(data) - start > MAX_PIECE_BYTES:
        stop = start + MAX_PIECE_BYTES
        while data[stop] & 0xC0 == 0x80:  # not inside a character
            stop -= 1
        parts.append(data[start:stop].decode())
        start = stop
    return [*parts, data[start:].decode()]
