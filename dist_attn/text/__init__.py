"""Incremental tokenisers: bytes in, token ids out, and no token ever depends on where an upload was cut."""

from dist_attn.text.base import TAIL_BYTES, Tokeniser
from dist_attn.text.bpe import BpeTokeniser
from dist_attn.text.byte_level import ByteLevelTokeniser, read_byte_level
from dist_attn.text.bytes import ByteTokeniser
from dist_attn.text.folder import load_tokeniser
from dist_attn.text.incremental import IncrementalDecoder
from dist_attn.text.train import train_bpe

__all__ = [
    "TAIL_BYTES",
    "BpeTokeniser",
    "ByteLevelTokeniser",
    "ByteTokeniser",
    "IncrementalDecoder",
    "Tokeniser",
    "load_tokeniser",
    "read_byte_level",
    "train_bpe",
]
