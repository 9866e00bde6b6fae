"""Incremental tokenisers: bytes in, token ids out, and no token ever depends on where an upload was cut."""

from pathlib import Path
from typing import Any

from dist_attn.errors import ModelFolderError, TokenError
from dist_attn.shipped import origin
from dist_attn.shipped.folder_files import find_json_object
from dist_attn.shipped.generation_config import read_generation_defaults
from dist_attn.text.base import TAIL_BYTES, WORD_TAIL_BYTES, IncrementalDecoder, Tokeniser, Vocabulary
from dist_attn.text.bpe import BYTE_PIECES, BpeTokeniser, ByteTokeniser, train_bpe
from dist_attn.text.byte_level import ByteLevelTokeniser
from dist_attn.text.foreign import ForeignTokeniser
from dist_attn.text.hugging_face import CONFIG_NAME, FILE_NAME, SPECIAL_NAME, WRITTEN_BY, read_tokenizer_json
from dist_attn.text.library import LibraryTokeniser
from dist_attn.text.pieces import TEXT_PATTERN
from dist_attn.text.sentence_piece import SentencePieceTokeniser
from dist_attn.text.whole_text import content_of
from dist_attn.text.word_piece import WordPieceTokeniser

__all__ = [
    "TAIL_BYTES",
    "WORD_TAIL_BYTES",
    "BpeTokeniser",
    "ByteLevelTokeniser",
    "ByteTokeniser",
    "ForeignTokeniser",
    "IncrementalDecoder",
    "LibraryTokeniser",
    "SentencePieceTokeniser",
    "Tokeniser",
    "WordPieceTokeniser",
    "end_tokens",
    "fitted",
    "load_tokeniser",
    "read_foreign",
    "train_bpe",
]


def load_tokeniser(folder: Path) -> Tokeniser:
    """Load the tokeniser that `save` wrote into this folder, with the same ids.

    A downloaded model's folder has the tokens of another program, and so has one with a tokenizer_config.json that does
    not carry this project's mark.

    Raises: ModelFolderError naming the file when it is missing or of another kind.
    """
    path = Path(folder) / FILE_NAME
    about = find_json_object(path.with_name(CONFIG_NAME))
    if (about is not None and not WRITTEN_BY.items() <= about.items()) or origin(Path(folder)) == "downloaded":
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


def end_tokens(tokeniser: Tokeniser, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens each of which ends a text of a folder's model: those its files name, else the end of a document.

    Raises: ModelFolderError as `read_generation_defaults`.
    """
    named = read_generation_defaults(folder, vocab_size).end_tokens
    return named or (() if tokeniser.end_token is None else (tokeniser.end_token,))


def fitted(tokeniser: Tokeniser, folder: Path, vocab_size: int) -> Tokeniser:
    """Fit a tokeniser to a model of `vocab_size` tokens: ours must have as many; others may be padded or cut.

    Embeddings are often padded to a round number of rows: the ids without a token are unused ones then. Where another
    program's files have more tokens, those are added ones, which no text may hold then.

    Raises: ModelFolderError naming the folder and both numbers.
    """
    if isinstance(tokeniser, ForeignTokeniser):
        if tokeniser.vocab_size <= vocab_size:
            return tokeniser.padded(vocab_size)
        try:
            return tokeniser.cut_to(vocab_size)
        except ModelFolderError as error:
            raise ModelFolderError(f"{folder}: {error}") from None
    if tokeniser.vocab_size != vocab_size:
        raise ModelFolderError(
            f"{folder}: tokenizer.json has {tokeniser.vocab_size} tokens, config.json says {vocab_size}; "
            "they must be equal, so the files are of two models"
        )
    return tokeniser


def read_foreign(folder: Path, *, streams: bool = False) -> ForeignTokeniser:
    """Read the tokeniser in a folder of Hugging Face's: of a kind that cuts streams, else one that reads whole texts.

    Raises: ModelFolderError for files that are missing or unreadable, and where it `streams` for other kinds.
    """
    path = folder / FILE_NAME
    contents = find_json_object(path)
    if contents is None:
        words = f"{path} cannot be read: there is no such file"
        if (folder / "tiktoken.model").is_file():
            words += "; tiktoken.model is not read, and docs/how-to/your-model.md says how transformers makes one of it"
        raise ModelFolderError(words)
    about = (find_json_object(folder / SPECIAL_NAME) or {}) | (find_json_object(folder / CONFIG_NAME) or {})
    listed = about.get("added_tokens_decoder")
    if wrong := [key for key in (listed if isinstance(listed, dict) else ()) if not key.isdecimal()]:
        raise ModelFolderError(
            f"{folder / CONFIG_NAME}: added_tokens_decoder has the key {wrong[0]!r}; needed are ids, whole numbers"
        )
    end, model = content_of(about.get("eos_token")), contents.get("model")
    if not isinstance(model, dict):
        raise ModelFolderError(f"{path} has no model; needed is a file of the tokenizers library")
    try:
        return _kind(model)(contents, end, str(path), about)
    except ModelFolderError:
        if streams:
            raise
        return LibraryTokeniser(contents, end, str(path), about)


def _kind(model: dict[str, Any]) -> type[ForeignTokeniser]:
    if model.get("type") == "WordPiece":
        return WordPieceTokeniser
    if model.get("type") == "Unigram" or model.get("byte_fallback"):
        return SentencePieceTokeniser
    return ByteLevelTokeniser
