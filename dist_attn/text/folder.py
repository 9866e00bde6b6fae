"""The tokeniser of a model folder."""

from pathlib import Path

from dist_attn.errors import ModelFolderError, TokenError
from dist_attn.text.base import Tokeniser
from dist_attn.text.bpe import BpeTokeniser
from dist_attn.text.byte_level import CONFIG_NAME, read_byte_level
from dist_attn.text.bytes import BYTE_PIECES, ByteTokeniser
from dist_attn.text.hugging_face import FILE_NAME, read_tokenizer_json
from dist_attn.text.pieces import TEXT_PATTERN
from dist_attn.text.vocabulary import Vocabulary

__all__ = ["load_tokeniser"]


def load_tokeniser(folder: Path) -> Tokeniser:
    """The tokeniser that `save` wrote into this folder, with the same ids.

    A folder with a tokenizer_config.json has the tokens of another program.

    Raises: ModelFolderError naming the file when it is missing or of another kind.
    """
    path = Path(folder) / FILE_NAME
    if (Path(folder) / CONFIG_NAME).is_file():
        return read_byte_level(Path(folder))
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
