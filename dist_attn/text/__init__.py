"""Incremental tokenisers: bytes in, token ids out, and no token ever depends on where an upload was cut."""

import json
from pathlib import Path
from typing import Any

from dist_attn.errors import ModelFolderError, TokenError
from dist_attn.text.base import TAIL_BYTES, WORD_TAIL_BYTES, IncrementalDecoder, Tokeniser, Vocabulary
from dist_attn.text.bpe import BYTE_PIECES, BpeTokeniser, ByteTokeniser, train_bpe
from dist_attn.text.byte_level import ByteLevelTokeniser
from dist_attn.text.foreign import ForeignTokeniser
from dist_attn.text.hugging_face import CONFIG_NAME, FILE_NAME, WRITTEN_BY, read_tokenizer_json
from dist_attn.text.pieces import TEXT_PATTERN
from dist_attn.text.sentence_piece import SentencePieceTokeniser
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


def load_tokeniser(folder: Path) -> Tokeniser:
    """The tokeniser that `save` wrote into this folder, with the same ids.

    A folder with a tokenizer_config.json that does not carry this project's mark has the tokens of another program.

    Raises: ModelFolderError naming the file when it is missing or of another kind.
    """
    path = Path(folder) / FILE_NAME
    about = _read_object(path.with_name(CONFIG_NAME))
    if about is not None and not WRITTEN_BY.items() <= about.items():
        return read_foreign(Path(folder))
    contents = read_tokenizer_json(path)
    if not contents.merges and contents.pieces == BYTE_PIECES:
        return ByteTokeniser()
    if contents.split_pattern != TEXT_PATTERN:
        raise ModelFolderError(
            f"{path} cuts text into words by another rule than this version does, so its model would see other "
            "tokens than it was trained on; needed is a file that BpeTokeniser.save wrote"
        )
    try:
        tokeniser = BpeTokeniser(contents.merges)
    except TokenError as error:
        raise ModelFolderError(f"{path} is damaged: {error}") from None
    if Vocabulary(contents.pieces) != tokeniser.vocabulary:
        raise ModelFolderError(f"{path} is damaged: its ids are not those that its merges give")
    return tokeniser


def read_foreign(folder: Path) -> ForeignTokeniser:
    """The tokeniser in a folder of Hugging Face's.

    Raises: ModelFolderError for files that are missing, unreadable or of a kind that is not supported.
    """
    path = folder / FILE_NAME
    contents, about = _read_object(path), _read_object(folder / CONFIG_NAME) or {}
    if contents is None:
        raise ModelFolderError(f"{path} cannot be read: there is no such file")
    end = about.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    model = contents.get("model")
    if not isinstance(model, dict):
        raise ModelFolderError(f"{path} has no model; needed is a file of the tokenizers library")
    return _kind(model)(contents, end if isinstance(end, str) else None, str(path))


def _kind(model: dict[str, Any]) -> type[ForeignTokeniser]:
    if model.get("type") == "WordPiece":
        return WordPieceTokeniser
    if model.get("type") == "Unigram" or model.get("byte_fallback"):
        return SentencePieceTokeniser
    return ByteLevelTokeniser


def _read_object(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds, empty where that is no object; None where there is no file."""
    try:
        contents = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from None
    return contents if isinstance(contents, dict) else {}
