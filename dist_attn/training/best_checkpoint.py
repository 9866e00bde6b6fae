"""The best checkpoint of a run: a second name for its files, which pruning the others does not touch.

`checkpoints/best` is a link to `checkpoints/best-NNNNNN`, whose files are those of `step-NNNNNN` under hard links, or
copies where the file system has none. A folder is made beside its place and renamed, and the link is replaced in one
step, so whoever is killed at any moment leaves a whole best checkpoint, the one before or the new one.
"""

import contextlib
import os
import shutil
from pathlib import Path

from dist_attn.errors import ConfigError

__all__ = ["find_best", "keep_best"]


def keep_best(checkpoints: Path, step: int) -> bool:
    """Make the checkpoint of `step` the best one; whether it is there."""
    source, folder, link = (checkpoints / name for name in (f"step-{step:06d}", f"best-{step:06d}", "best"))
    if not folder.is_dir():
        if not source.is_dir():
            return False
        temporary = checkpoints / f".{folder.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            shutil.copytree(source, temporary, copy_function=_link)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    beside = checkpoints / ".best.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)  # a copy of the run that followed links
    beside.replace(link)
    for other in checkpoints.glob("best-*"):
        if other != folder:
            shutil.rmtree(other)
    return True


def find_best(checkpoints: Path, step: int) -> Path:
    """The best checkpoint, which is that of `step`.

    Raises: ConfigError where it is not there any more.
    """
    folder = checkpoints / f"best-{step:06d}"
    if not folder.is_dir():
        raise ConfigError(f"the checkpoint of the best validation, {folder}, is gone; resume with run.export = last")
    return folder


def _link(source: str, target: str) -> None:
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
