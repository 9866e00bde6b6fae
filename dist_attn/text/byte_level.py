"""Byte-level BPE as other programs wrote it (GPT-2, Llama 3, Pythia), over a stream: their cut, with a longest piece.

A piece is what their pattern matches at its start in the next TAIL_BYTES bytes, and never more than
MAX_PIECE_BYTES: so it is decided by these bytes alone, and where an upload was split cannot change a token. The tokens
are those of the `tokenizers` library wherever no piece of its own is longer. A normaliser (Pythia: NFC) is not applied,
since any bytes have to come back as they were; nor is text ever read as one of the added tokens.
"""

import re
from typing import Any
from typing import final as final_class

from dist_attn.text.base import TAIL_BYTES
from dist_attn.text.foreign import MAX_PIECE_BYTES, PiecewiseTokeniser, ids_of
from dist_attn.text.hugging_face import printable, raw

# Valid text, or one byte that is no UTF-8 (decoded to a lone surrogate).
_SPANS = re.compile("[^\udc80-\udcff]+|[\udc80-\udcff]")


@final_class
class ByteLevelTokeniser(PiecewiseTokeniser):
    """A byte-level BPE tokeniser with the cut of its own file."""

    supported = "byte-level BPE as of GPT-2, Llama 3 and Pythia"

    def _encode_block(self, data: bytes, final: bool, out: bytearray) -> int:
        """Append the tokens of the pieces that these bytes decide; returns how many bytes they cover."""
        last = len(data) if final else len(data) - TAIL_BYTES + 1  # no piece may start from here on
        at, start = 0, 0  # where the next piece of the whole block starts, and the next one that is a token's
        for span in _SPANS.findall(data.decode("utf-8", "surrogateescape")):
            for piece in self._cut(span):
                begin, at = at, at + len(piece)
                # A cut inside a piece that was too long may reach into the pieces behind it.
                while start < at:
                    if start >= last:
                        return start
                    whole = start == begin and len(piece) <= MAX_PIECE_BYTES
                    first = piece if whole else self._first_piece(data[start : start + TAIL_BYTES])
                    out += self._ids(first)
                    start += len(first)
        return start

    def _first_piece(self, data: bytes) -> str:
        """Find the piece at the start of these bytes."""
        piece = self._cut(_SPANS.findall(data.decode("utf-8", "surrogateescape"))[0])[0]
        if len(piece) <= MAX_PIECE_BYTES:
            return piece
        stop = MAX_PIECE_BYTES
        while data[stop] & 0xC0 == 0x80:  # not inside a character
            stop -= 1
        return piece[:stop]

    def _cut(self, span: str) -> list[str]:
        """Cut a span into pieces in the printable alphabet, one character per byte."""
        if "\udc80" <= span[0] <= "\udcff":
            return [printable(bytes([ord(span[0]) - 0xDC00]))]
        return [piece for piece, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(span)]

    @staticmethod
    def _check(contents: dict[str, Any]) -> None:
        """Raises: ValueError or KeyError for anything that would give other tokens than ours."""
        model, cut, normaliser = contents["model"], contents["pre_tokenizer"], contents.get("normalizer")
        if model["type"] != "BPE" or model.get("byte_fallback"):
            raise ValueError(
                f"its model is {model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}"
            )
        if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError("its merges have dropout, a prefix or a suffix")
        if normaliser is not None and normaliser["type"] != "NFC":
            raise ValueError(f"its normalizer is {normaliser['type']}")
        steps = (cut or {}).get("pretokenizers", [cut])
        kinds = [step["type"] for step in steps if step is not None]
        if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]) or steps[-1]["add_prefix_space"]:
            raise ValueError(
                f"its pre_tokenizer is {' and '.join(kinds) or 'missing'}, or puts a blank before the text"
            )
        if steps[-1].get("use_regex", True) == (kinds[0] == "Split"):
            raise ValueError("its pre_tokenizer cuts by two patterns or by none")

    @staticmethod
    def _table(contents: dict[str, Any]) -> tuple[bytes, ...]:
        """The bytes of every id; none for special tokens and for numbers that no token has."""
        added = {int(token["id"]): token for token in contents["added_tokens"]}
        vocab = {number: text for text, number in ids_of(contents).items()}
        pieces = [b""] * (max([*added, *vocab]) + 1)
        for number, text in vocab.items():
            if number not in added:
                pieces[number] = raw(text)
        for number, token in added.items():
            pieces[number] = b"" if token["special"] else token["content"].encode()
        if missing := {bytes([value]) for value in range(256)} - set(pieces):
            raise ValueError(f"{len(missing)} of the 256 bytes have no token")
        return tuple(pieces)
