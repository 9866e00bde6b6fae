"""A Hugging Face folder as it lies on the disk: its config.json and its safetensors, and nothing that unpickles."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import find_json_object, read_json_object
from dist_attn.shipped.stored_tensors import check_safetensors

__all__ = ["ACTIVATIONS", "SourceConfig", "SourceWeights", "read_source_config", "read_source_weights"]

WEIGHTS = "model.safetensors"

# Names of Hugging Face's activations, and ours.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


@final
@dataclass(frozen=True)
class SourceConfig:
    """The values of a config.json; each is checked where it is read."""

    path: Path
    values: dict[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        """Read a whole number of at least 1; `default` where the file has none or null.

        Raises: ModelFolderError for anything else.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFolderError(f"{self.path}: {key} is {value!r}; needed is a whole number of at least 1")
        return value

    def real(self, key: str, default: float) -> float:
        """Read a number above 0.

        Raises: ModelFolderError for anything else.
        """
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ModelFolderError(f"{self.path}: {key} is {value!r}; needed is a number above 0")
        return float(value)

    def one_of(self, key: str, *allowed: Any) -> Any:
        """Read one of the values that are supported; the first of them where the file does not say.

        Raises: ModelFolderError for any other, which names them.
        """
        value = self.values.get(key, allowed[0])
        # True is no 1, and 0 no False: JSON tells them apart.
        if not any(type(value) is type(each) and value == each for each in allowed):
            supported = " or ".join(json.dumps(each) for each in allowed)
            raise ModelFolderError(f"{self.path}: {key} is {value!r}; supported is {supported}")
        return value


@final
class SourceWeights:
    """The tensors of a folder, in float32; each is taken once, and at the end none may be left."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> torch.Tensor:
        """Take the tensor of this name.

        Raises: ModelFolderError where there is none.
        """
        if name not in self._tensors:
            raise ModelFolderError(f"{self._path} has no tensor {name!r}, which its config.json needs")
        return self._tensors.pop(name).float()

    def drop(self, *endings: str) -> None:
        """Forget tensors that are computed from the configuration: masks and frequencies."""
        for name in [name for name in self._tensors if name.endswith(endings)]:
            del self._tensors[name]

    def require_empty(self) -> None:
        """Raises: ModelFolderError for a tensor that no layer took."""
        if self._tensors:
            raise ModelFolderError(
                f"{self._path} holds a tensor {min(self._tensors)!r} that a model of its config.json does not have"
            )


def read_source_config(folder: Path) -> SourceConfig:
    """Read the configuration of a folder.

    Raises: ModelFolderError for a folder without a readable one.
    """
    path = folder / "config.json"
    values = find_json_object(path)
    if values is None:
        raise ModelFolderError(
            f"{path} cannot be read: there is no such file; needed is a folder with config.json, {WEIGHTS}, "
            "tokenizer.json"
        )
    return SourceConfig(path, values)


def read_source_weights(folder: Path) -> SourceWeights:
    """Read all tensors of a folder, from one safetensors file or from those that an index lists.

    Raises: ModelFolderError for files that are missing or damaged, and for weights that only pickle could read.
    """
    index, tensors = folder / f"{WEIGHTS}.index.json", dict[str, torch.Tensor]()
    names = {WEIGHTS}
    if index.is_file() and not (folder / WEIGHTS).is_file():
        try:
            names = {str(name) for name in read_json_object(index)["weight_map"].values()}
        except (KeyError, AttributeError):
            raise ModelFolderError(f"{index} is not an index of safetensors: it needs a 'weight_map'") from None
    for name in sorted(names):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
            reason = "; .bin and .pt files are not read, since they can run code: save the model as safetensors"
            raise ModelFolderError(f"{folder} has no {name!r}{reason if pickled else ', which holds the weights'}")
        try:
            check_safetensors(path)
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(f"{path} cannot be read as safetensors: {error}") from None
    return SourceWeights(folder, tensors)
