"""`python -m dist_attn.adapters FOLDER`: whether the tensors of a downloaded folder are its model's.

transformers itself decides, by loading tensors of the stored shapes that have no bytes: so its renamings, ties and
merged experts count, and no weight is read. Prints one line of JSON, a `LoadedSizes`.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from dist_attn.adapters.binding import ATTENTION
from dist_attn.adapters.model import AdaptedModel
from dist_attn.adapters.weights import DTYPES, make_model
from dist_attn.errors import ModelFolderError
from dist_attn.rank_link.tether import die_with_parent
from dist_attn.shipped.downloaded import DownloadedModel, LoadedSizes, read_downloaded

TRIED_TOKENS = 2
PART_BYTES = 1 << 24


def check_tensors(model: DownloadedModel) -> LoadedSizes:
    """Load the model of the folder without its bytes and return its sizes, with weights in the precision of the folder.

    Raises: ModelFolderError as `make_model`, and where the model of config.json cannot read a token.
    """
    with _without_bytes(), _AnswersEqual(model):
        stored = {name: torch.empty(t.shape, dtype=DTYPES[t.dtype], device="cpu") for name, t in model.tensors.items()}
        loaded = make_model(model.folder, stored, getattr(torch, model.dtype), attention=ATTENTION)
        sizes: Counter[str] = Counter()
        for weight in loaded.parameters():
            sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel() * weight.element_size()
        parameters = loaded.num_parameters()
    try:
        state_bytes, token_bytes, of_layers = _tried_sizes(loaded)
    except Exception as error:  # an option that operations do not know, or one that the modules fail at
        said = " ".join(str(error).split())
        raise ModelFolderError(f"{model.folder}: the model of config.json cannot read a token: {said}") from None
    return LoadedSizes(parameters, dict(sizes), state_bytes, token_bytes, of_layers)


@torch.inference_mode()
def _tried_sizes(loaded: PreTrainedModel) -> tuple[int, int, tuple[int, ...]]:
    """Bytes of a state in float32 before any token, and what a token adds: by running two with weights of 0.

    And the parameters of each layer.
    """
    for module in loaded.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_zeros(weight), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _zeros(buffer).clone())
    model = AdaptedModel(loaded)
    loaded.set_experts_implementation("eager")  # others take all weights into one product, which then need memory
    empty = model.initial_state(1)
    grown = model.hidden(torch.zeros(1, TRIED_TOKENS, dtype=torch.int64, device="cpu"), None, empty)[1]
    of_layers = tuple(sum(weight.numel() for weight in part.parameters()) for part in model.parts)
    return empty.num_bytes(), -(-(grown.num_bytes() - empty.num_bytes()) // TRIED_TOKENS), of_layers


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of `like`, in the memory of one number."""
    dtype = torch.float32 if like.is_floating_point() else like.dtype
    return torch.zeros((), dtype=dtype, device="cpu").expand(like.shape)


@contextmanager
def _without_bytes() -> Iterator[None]:
    """Tensors of this block have shapes and kinds of numbers alone; the mode is this thread's, so all loading is."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


class _AnswersEqual(TorchDispatchMode):
    """Says whether two tensors without bytes are equal, as transformers asks of weights that are tied and both stored.

    By the files: whether all stored tensors of their shape, the embedding and the read-out, have the same bytes. Where
    others have that shape too the answer is no, and the weights are counted twice.
    """

    def __init__(self, model: DownloadedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.equal.default:
            return func(*args, **(kwargs or {}))
        alike = [tensor for tensor in self._model.tensors.values() if tensor.shape == tuple(args[0].shape)]
        paths = [self._model.folder / tensor.file for tensor in alike]
        stored = [
            np.memmap(path, np.uint8, "r", tensor.begin, tensor.nbytes)
            for path, tensor in zip(paths, alike, strict=True)
        ]
        return all(_same(stored[0], other) for other in stored[1:])


def _same(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    parts = range(0, len(a), PART_BYTES)
    return len(a) == len(b) and all(np.array_equal(a[n : n + PART_BYTES], b[n : n + PART_BYTES]) for n in parts)


def main(folder: str) -> None:
    """Print what was found."""
    die_with_parent()
    try:
        found = check_tensors(read_downloaded(Path(folder)))
    except ModelFolderError as error:
        found = LoadedSizes(refusal=str(error))
    print(msgspec.json.encode(found).decode())
