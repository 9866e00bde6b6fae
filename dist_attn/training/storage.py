"""Writing the files of a run: where the disk is full, one line says what was not written and what is sound."""

import contextlib
import re
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
        # safetensors puts the system's words into its own.
        reason = getattr(error, "strerror", None) or re.sub(r"^.*I/O error: (.*) \(os error \d+\)$", r"\1", str(error))
        newest = latest_checkpoint(run_folder / "checkpoints")
        sound = "there is no checkpoint yet" if newest is None else f"{newest} is sound"
        way = "go on with --resume" if (run_folder / "config.json").exists() else "start again"
        raise StorageError(f"{what} could not be written: {reason}; {sound}: make room and {way}") from error
