"""Folders and files that no other user of the machine may read, whatever the umask says, and names that stay."""

import contextlib
import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Make a folder, with the missing ones above it, that only its owner may enter; one that is there stays as it is.

    The names of new folders are on the disk afterwards.

    Raises: OSError.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def tighten(folder: Path, ours: Sequence[str], inside: Sequence[str] = ()) -> bool | None:
    """Take the rights of other users away from a folder that holds only names of ours; None where they have none.

    A folder with anything else in it is not ours to close: it keeps its mode, and the answer is False. In both cases
    the rights are taken away from the names `inside`, with all that is in them. Names are patterns of fnmatch.

    A folder of another user, one that is shared like /tmp, one that is not there, and one of a file system without such
    rights stay as they are.
    """
    try:
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX or not found.st_mode & OTHERS:
            return None
        is_ours = all(any(fnmatchcase(path.name, name) for name in ours) for path in folder.iterdir())
        if is_ours:
            folder.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)
    except OSError:
        return None
    for name in inside:
        for top in folder.glob(name):
            for path in [top] if top.is_symlink() else [top, *top.rglob("*")]:
                with contextlib.suppress(OSError):  # another process may delete it meanwhile
                    mine = path.lstat()
                    if mine.st_uid == os.geteuid() and not stat.S_ISLNK(mine.st_mode):
                        path.chmod(stat.S_IMODE(mine.st_mode) & ~OTHERS)
    return is_ours


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, so that a power cut leaves them.

    Raises: OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(…, opener=)`, so that one that is made now can be read by its owner alone."""
    return os.open(path, flags, 0o600)
