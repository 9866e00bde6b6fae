"""Where what was measured or compiled on this machine is kept for the next process."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """dist-attn in $XDG_CACHE_HOME, else in ~/.cache; for a user without a home, among temporary files."""
    cache = environ.get("XDG_CACHE_HOME")
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if not cache and not home.is_absolute():
        return Path(tempfile.gettempdir()) / f"dist-attn-{os.getuid()}"
    return (Path(cache) if cache else home / ".cache") / "dist-attn"
