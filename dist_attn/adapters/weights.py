"""Weights of a downloaded folder: its files are mapped, and what the model does not hold as it is stored is let go.

A tensor that the model holds as it is stored stays a part of its file: it takes memory when it is used, and processes
of one machine that map the same file have it once. All others are read one after the other; the pages they were read
from are given back before the next one.
"""

import logging
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from dist_attn.adapters.passes import current_pass
from dist_attn.errors import ModelFolderError
from dist_attn.mixers.narrow_layers import Int8Linear
from dist_attn.ops.decode_step import BLOCKS
from dist_attn.shipped.folder_files import open_file
from dist_attn.shipped.stored_tensors import StoredTensor

ONE_THREAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers
DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8,
}  # fmt: skip
KEPT: Final = (
    "gate", "router", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "f_a_proj",
    "f_b_proj", "f_proj", "dt_proj", "x_proj", "igate_preact", "fgate_preact", "ifgate_preact",
)  # fmt: skip
"""Names of linear layers whose outputs say how much is kept, or which expert is asked: they stay as they are."""

_LOADING = Lock()


class MappedFiles:
    """The files of a folder, each mapped once; what is written into a tensor of theirs never reaches them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor that lies in its file.

        Raises: ModelFolderError for a file that cannot be read.
        """
        if stored.file not in self._maps:
            try:
                with open_file(self._folder / stored.file) as file:
                    self._maps[stored.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ModelFolderError(f"{self._folder / stored.file} cannot be read: {error.strerror}") from None
        dtype = DTYPES[stored.dtype]
        own = torch.frombuffer(self._maps[stored.file], dtype=torch.uint8)[stored.begin : stored.begin + stored.nbytes]
        if stored.begin % dtype.itemsize:
            own = own.clone()  # numbers begin at multiples of their size
        return own.view(dtype).view(stored.shape)

    def drop_pages(self) -> None:
        """Give back the memory of all that was read; what is used again is read again, from the system's cache."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class ReadWhenAsked:
    """A stored tensor in the form that transformers reads them: by `[...]`."""

    files: MappedFiles
    stored: StoredTensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.files.drop_pages()
        return self.files.tensor(self.stored)[index]


class LeftOut(torch.Tensor):
    """A stored tensor without its bytes: on `meta`, and there it stays when transformers wants it elsewhere."""

    @staticmethod
    def of(stored: StoredTensor) -> "LeftOut":
        """Make one in the shape and type of a stored tensor."""
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta").as_subclass(LeftOut)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            args = [arg for arg in args if not isinstance(arg, str | torch.device)]
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def forget_left_out(model: PreTrainedModel) -> None:
    """Have plain parameters on `meta` in the place of what was left out."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, LeftOut):
                plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                module.register_parameter(name, nn.Parameter(plain, requires_grad=False))


def make_model(
    folder: Path, weights: dict[str, Any], dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """The model of config.json with these weights, which are read one after the other; nothing is fetched.

    Raises: ModelFolderError where transformers makes no model of config.json, and naming a tensor that is missing, that
        the model does not have, or that has another shape.
    """
    with _reports() as reports:
        try:
            return _make_model(folder, weights, dtype, attention)
        except ModelFolderError:
            raise
        except Exception as error:  # transformers' classes of models and configurations raise whatever they like
            said = next(filter(None, reports), "") or f"{type(error).__name__}: {error}"
            raise ModelFolderError(f"{folder}: transformers cannot load it: {' '.join(said.split())}") from None


def _make_model(folder: Path, weights: dict[str, Any], dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(kind.config_class, type) and not isinstance(config, kind.config_class):
        config = config.get_text_config()  # the part of a model of images and text that writes
    with _one_thread():
        model, about = kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the shapes are told, which we refuse
        )
    _refuse_differences(folder, about)
    made: PreTrainedModel = model
    return made


@dataclass(frozen=True)
class Blocks:
    """A matrix as its GGUF file has it, [O, bytes of a row], and the place and version of its weights."""

    form: str
    rows: torch.Tensor
    of: tuple[int, int]


def keep_blocks(model: PreTrainedModel, files: MappedFiles, stored: dict[str, StoredTensor]) -> None:
    """Leave with linear layers the blocks of their weights, from which decode steps read the same numbers.

    Raises: ModelFolderError for blocks of a weight that the model does not have, or that has another shape.
    """
    weights, found = dict(model.named_parameters()), dict[int, tuple[str, StoredTensor]]()
    for key, tensor in stored.items():
        form, _, name = key.partition(" ")
        weight, (numbers, nbytes) = weights.get(name), BLOCKS.get(form, (0, 0))
        known = weight is not None and weight.dim() == 2 and numbers and weight.shape[1] % numbers == 0
        if weight is None or not known or tensor.shape != (len(weight), weight.shape[1] // numbers * nbytes):
            raise ModelFolderError(
                f"{tensor.file}: {key!r} of {tensor.dtype} {list(tensor.shape)} are no blocks of this model; convert "
                "the GGUF file again"
            )
        found[id(weight)] = form, tensor
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) in found and not module.weight.is_meta:
            form, tensor = found[id(module.weight)]
            vars(module)["blocks"] = Blocks(form, files.tensor(tensor), _place_and_version(module.weight))


def current_blocks(module: nn.Module) -> Blocks | None:
    """The blocks of a layer, if it has some and its weights have been neither trained nor exchanged since."""
    blocks: Blocks | None = vars(module).get("blocks")
    return blocks if blocks is not None and _place_and_version(cast(Any, module).weight) == blocks.of else None


def _place_and_version(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def hold_as_int8(model: PreTrainedModel, files: MappedFiles) -> None:
    """Replace linear layers, one after the other, by ones of 8-bit integers with a scale for each output.

    What is looked up by token stays as it is, and so do gates and steps, of which a few rows decide how long the model
    remembers, routers, and experts that lie side by side in one tensor.

    Raises: InputError for weights that are not finite.
    """
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module) is nn.Linear and own not in KEPT:
            setattr(model.get_submodule(parent), own, _narrowed(module))
            files.drop_pages()


def _narrowed(module: nn.Linear) -> "NarrowLinear":
    """The module as a layer of 8-bit integers, without bytes where its weights have none."""
    if not module.weight.is_meta:
        return NarrowLinear(Int8Linear(module), module.weight.dtype)
    for name, weight in list(module.named_parameters()):
        zeros = torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)
        module.register_parameter(name, nn.Parameter(zeros, requires_grad=False))
    narrow = NarrowLinear(Int8Linear(module), module.weight.dtype)
    narrow.layer.to("meta")
    return narrow


class NarrowLinear(nn.Module):
    """An int8 layer that knows by the pass which of its products are of decode steps."""

    def __init__(self, layer: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer.train(False)
        # Modules ask for it, to give their inputs its type; it is no weight, and no number is in it.
        self.weight = torch.empty(0, dtype=dtype, device=layer.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        one = current_pass()
        rows = x.reshape(-1, x.shape[-1]) if one is not None and one.step else x
        y: torch.Tensor = self.layer(rows)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _refuse_differences(folder: Path, about: dict[str, Any]) -> None:
    for key, words in (
        ("missing_keys", "its files lack {} of the tensors that the model of config.json needs, such as {!r}"),
        ("unexpected_keys", "its files hold {} tensors that the model of config.json does not have, such as {!r}"),
    ):
        if about[key]:
            raise ModelFolderError(f"{folder}: {words.format(len(about[key]), min(about[key]))}")
    for name, held, needed in sorted(about["mismatched_keys"]):
        raise ModelFolderError(
            f"{folder}: {name!r} has shape {tuple(held)}, the model of config.json needs {tuple(needed)}"
        )


@contextmanager
def _reports() -> Iterator[list[str]]:
    """Collect the lines in which transformers reports tensors that it could not convert, during the block."""
    logger, said = logging.getLogger("transformers.modeling_utils"), list[str]()

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()).splitlines()
            said.extend(line for line in lines if "CONVERSION" in line)

    keeper, passed_on = Keeper(), logger.propagate
    logger.addHandler(keeper)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.propagate = passed_on
        logger.removeHandler(keeper)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let transformers load in the thread that asks, each tensor when it is its turn."""
    with _LOADING:
        had = os.environ.get(ONE_THREAD)
        os.environ[ONE_THREAD] = "1"
        try:
            yield
        finally:
            del os.environ[ONE_THREAD]
            if had is not None:
                os.environ[ONE_THREAD] = had
