"""Where what was measured or compiled here is kept for the next process, and whether others can change it there."""

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_folder", "changed_by_others"]

NOBODY = 65534  # what Linux shows as the owner where a user namespace does not know the real one


def cache_folder(environ: Mapping[str, str]) -> Path:
    """dist-attn in $XDG_CACHE_HOME, else in ~/.cache; for a user without a home, among temporary files."""
    cache = environ.get("XDG_CACHE_HOME")
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if not cache and not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"dist-attn-{os.getuid()}"
    return (Path(cache) if cache else home / ".cache") / "dist-attn"


def changed_by_others(folder: Path) -> Path | None:
    """The first folder on the way up from this one in which another user than root could put things, or exchange them.

    `folder` is resolved: it holds no symbolic links. A shared folder with the sticky bit, such as /tmp, is safe to pass
    through, since only owners may rename what lies in it, but not to put things into.

    Raises: OSError where one of them cannot be looked at.
    """
    for place in (folder, *folder.parents):
        found = place.stat()
        if found.st_uid not in _trusted_owners():
            return place
        others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid))
        if others and (place == folder or not found.st_mode & stat.S_ISVTX):
            return place
    return None


def _trusted_owners() -> set[int]:
    trusted = {0, os.getuid()}
    try:
        maps = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return trusted
    # Without a user of that number in this namespace, it stands for the host's root, who owns what lies above.
    known = any(first <= NOBODY < first + count for first, _, count in maps)
    return trusted if known else trusted | {NOBODY}


def _own_group(group: int) -> bool:
    """Whether it is this user's group of one, which many systems make for each user."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
