"""Tensors sharded over ranks, in safetensors files of one rank's shards each, by torch.distributed.checkpoint.

No rank asks another: each plans for its own shards when it writes, and finds its own by the files' headers when it
reads. So nothing is pickled, neither in files nor between ranks.
"""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["read_shards", "read_whole", "whole_sizes", "write_shards"]


def write_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's shards of sharded tensors, and whole ones, as one file whose header says where they belong.

    Raises: OSError where it cannot be written.
    """
    aside = path.with_suffix(".parts")
    with _failures_unwrapped():
        save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True),
            planner=_OwnShards(flatten_state_dict=False),
            no_dist=True,
        )
    (file,) = aside.glob("*.safetensors")
    file.rename(path)
    shutil.rmtree(aside)


def whole_sizes(files: Sequence[Path]) -> dict[str, torch.Size]:
    """Read the shapes of the whole tensors whose shards these files hold.

    Raises: OSError or SafetensorError for files that cannot be read.
    """
    metadata = _reader(files).read_metadata().state_dict_metadata
    return {name: cast(TensorStorageMetadata, entry).size for name, entry in metadata.items()}


def read_whole(files: Sequence[Path]) -> dict[str, Tensor]:
    """Read the whole tensors whose shards these files hold.

    Raises: as `whole_sizes`.
    """
    metadata = _reader(files).read_metadata().state_dict_metadata
    entries = {name: cast(TensorStorageMetadata, entry) for name, entry in metadata.items()}
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") for name, entry in entries.items()
    }
    read_shards(files, tensors)
    return tensors


def read_shards(files: Sequence[Path], tensors: dict[str, Tensor]) -> None:
    """Fill tensors, whole ones or this rank's shards, from files with all shards of any number of ranks.

    Raises: as `whole_sizes`.
    """
    with _failures_unwrapped():
        load(tensors, storage_reader=_reader(files), no_dist=True)


def _reader(files: Sequence[Path]) -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = cast(Any, _TheseFiles(reader.fs, files))
    return reader


@final
class _TheseFiles:
    """The file system of a reader, which takes every file of a folder, where the folder holds these alone."""

    def __init__(self, whole: Any, files: Sequence[Path]) -> None:
        self._whole, self._files = whole, [str(file) for file in files]

    def ls(self, path: str) -> list[str]:
        return self._files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _OwnShards(DefaultSavePlanner):
    """A plan of one rank's shards alone: torch's own refuses tensors with holes."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


@contextmanager
def _failures_unwrapped() -> Iterator[None]:
    """Unwrap torch's errors of a rank, and silence its warning that a single process runs without a group."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
