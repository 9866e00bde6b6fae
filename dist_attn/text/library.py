"""A tokenizer.json of any other kind: the tokens of the `tokenizers` library, of texts that are read as a whole.

Nothing is known of where such a text could be cut without changing its tokens. So a stream is kept until it ends, and
one of more than MOST_BYTES is refused.
"""

from typing import Any
from typing import final as final_class

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dist_attn.errors import TokenError
from dist_attn.text.base import Bytes, check_bytes
from dist_attn.text.foreign import NOT_UTF8, ForeignTokeniser, byte_ends
from dist_attn.text.hugging_face import raw
from dist_attn.text.whole_text import WholeText, decoder_steps

__all__ = ["MOST_BYTES", "LibraryTokeniser"]

MOST_BYTES = 1 << 22


@final_class
class LibraryTokeniser(ForeignTokeniser):
    """A tokeniser of any kind that the `tokenizers` library reads; a stream's tokens come at its end."""

    supported = "whatever the tokenizers library reads"

    def __init__(self, contents: dict[str, Any], end_text: str | None, *more: Any, **options: Any) -> None:
        super().__init__(contents, end_text, *more, **options)
        if not decoder_steps(contents):
            self.dropped_blanks = 1  # without a decoder the library puts a blank before each token but the first

    def encode_piece(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], int]:
        """Encode all bytes with `final`, else none: the caller keeps them all.

        Raises: TokenError for more than MOST_BYTES, and if `data` is not bytes.
        """
        tokens, _, consumed = self.encode_with_ends(data, final=final)
        return tokens, consumed

    def encode_with_ends(self, data: Bytes, *, final: bool) -> tuple[NDArray[np.int32], NDArray[np.int64], int]:
        """Encode as `encode_piece`, and tell where in `data` each of the tokens ends."""
        check_bytes(data)
        if len(data) > MOST_BYTES:
            raise TokenError(
                f"a text of more than {MOST_BYTES} bytes is cut while it is read, and this model's tokenizer.json is "
                "of a kind of which no cut is known that leaves the tokens as they are; send shorter texts, or tokens"
            )
        if not final or not len(data):
            return np.empty(0, np.int32), np.empty(0, np.int64), 0
        text = bytes(data).decode("utf-8", "surrogateescape")
        with self._in_library():
            (encoding,) = self._tokenizer.encode_batch([NOT_UTF8.sub("\ufffd", text)], add_special_tokens=False)
        behind = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
        places = np.concatenate([np.zeros(1, np.int64), byte_ends(text)])
        ends = np.maximum.accumulate(places[behind]) if len(behind) else behind
        return self._known(np.array(encoding.ids, dtype=np.int32)), ends, len(data)

    @staticmethod
    def _check(contents: dict[str, Any]) -> None:
        """Accept all that the library reads."""

    @staticmethod
    def _table(contents: dict[str, Any]) -> tuple[bytes, ...]:
        """The bytes of every id, by the file's decoder; none for special tokens and for numbers that no token has."""
        library = WholeText(contents, {}).library
        added = library.get_added_tokens_decoder()
        vocab = {number: text for text, number in library.get_vocab().items()}
        steps = decoder_steps(contents)
        if [step["type"] for step in steps] in ([], ["WordPiece"]):
            return _spaced(library, max(vocab) + 1)
        pieces = [b""] * (max(vocab) + 1)
        for number, text in vocab.items():
            if number not in added or not added[number].special:
                pieces[number] = _bytes_of(text, steps)
        return tuple(pieces)


def _spaced(library: Tokenizer, size: int) -> tuple[bytes, ...]:
    """The bytes of ids under a decoder that puts a blank before each token but the first: what each adds to a text."""
    added, pieces = library.get_added_tokens_decoder(), [b""] * size
    before = min(library.get_vocab().values())
    known = len(library.decode([before], skip_special_tokens=False))
    for number in library.get_vocab().values():
        if number not in added or not added[number].special:
            pieces[number] = library.decode([before, number], skip_special_tokens=False)[known:].encode()
    return tuple(pieces)


def _bytes_of(text: str, steps: list[dict[str, Any]]) -> bytes:
    """The bytes that a token stands for within a text."""
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                try:
                    return raw(text)
                except KeyError:
                    return text.encode()
            case {"type": "Replace", "pattern": {"String": str() as old}, "content": str() as new}:
                text = text.replace(old, new)
            case {"type": "Metaspace"}:
                text = text.replace(step.get("replacement", "\u2581"), " ")
            case {"type": "BPEDecoder", "suffix": str() as suffix}:
                text = text.replace(suffix, " ")
            case {"type": "ByteFallback"} if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes([int(text[3:5], 16)])
    return text.encode()
