"""What the API knows of the model it serves, read from the model folder; never its weights."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dist_attn.errors import ModelFolderError

__all__ = ["ServedModel"]


class _Sizes(msgspec.Struct):
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True)
class ServedModel:
    """The one model behind this service; `created` is a unix time in seconds."""

    id: str
    vocab_size: int
    hidden_size: int
    created: int

    @classmethod
    def read(cls, folder: Path) -> "ServedModel":
        """The model of a folder; its id is the folder's name.

        Raises: ModelFolderError when config.json or tokenizer.json is missing or unusable.
        """
        path = folder / "config.json"
        if not (folder / "tokenizer.json").is_file():
            raise ModelFolderError(f"{folder} has no tokenizer.json; needed is a model folder of this project")
        try:
            sizes = msgspec.json.decode(path.read_bytes(), type=_Sizes)
            created = int(path.stat().st_mtime)
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise ModelFolderError(f"{path} is not a model's configuration: {error}") from None
        return cls(folder.resolve().name, sizes.vocab_size, sizes.hidden_size, created)
