"""Files and folders that several jobs share: made by the first that needs them, and there whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["make_once"]


def make_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`; where nothing is there yet, `make` writes it under a name beside it, which is then changed.

    Two processes may make it at the same time, and must make the same; one of both stays.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        _remove(beside)
        make(beside)
        try:
            beside.rename(path)
        except OSError:  # a folder that another process has made meanwhile
            if not path.exists():
                raise
            _remove(beside)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
