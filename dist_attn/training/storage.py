"""Writing the files of a run: where the disk is full, one line says what was not written and what is sound."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dist_attn.errors import StorageError
from dist_attn.training.checkpointing import latest_checkpoint

__all__ = ["writing"]


@contextlib.contextmanager
def writing(what: str, run_folder: Path) -> Iterator[None]:
    """While `what` is written into the folder of a run.

    Raises: StorageError for an error of the file system, with the checkpoint from which the run can go on.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        newest = latest_checkpoint(run_folder / "checkpoints")
        way = (
            "there is no checkpoint yet, the run begins again in another run.folder"
            if newest is None
            else f"{newest} is sound: make room and go on with --resume"
        )
        raise StorageError(f"{what} could not be written: {reason}; {way}") from error
