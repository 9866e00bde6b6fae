"""Incremental tokenisers: bytes in, token ids out, and no token ever depends on where an upload was cut."""

from dist_attn.text.base import TAIL_BYTES, WORD_TAIL_BYTES, Tokeniser
from dist_attn.text.bpe import BpeTokeniser
from dist_attn.text.byte_level import ByteLevelTokeniser
from dist_attn.text.bytes import ByteTokeniser
from dist_attn.text.folder import load_tokeniser, read_foreign
from dist_attn.text.foreign import ForeignTokeniser
from dist_attn.text.incremental import IncrementalDecoder
from dist_attn.text.sentence_piece import SentencePieceTokeniser
from dist_attn.text.train import train_bpe
from dist_attn.text.word_piece import WordPieceTokeniser

__all__ = [
    "TAIL_BYTES",
    "WORD_TAIL_BYTES",
    "BpeTokeniser",
    "ByteLevelTokeniser",
    "ByteTokeniser",
    "ForeignTokeniser",
    "IncrementalDecoder",
    "SentencePieceTokeniser",
    "Tokeniser",
    "WordPieceTokeniser",
    "load_tokeniser",
    "read_foreign",
    "train_bpe",
]
