"""Whether the files of a model folder are those that its manifest was written for; never imports torch."""

import hashlib
import json
from pathlib import Path

from dist_attn.errors import ModelFolderError

__all__ = ["check_manifest", "sha256"]


def check_manifest(folder: Path) -> None:
    """No manifest, no check.

    Raises: ModelFolderError when a file is not the one the manifest was written for, or cannot be read.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return
    try:
        wanted = json.loads(path.read_bytes())["sha256"]
        pairs = [(str(name), str(digest)) for name, digest in wanted.items()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelFolderError(f"{path} is not a manifest: it needs an object 'sha256' of file names") from None
    for name, digest in pairs:
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (folder / name).is_file():
            raise ModelFolderError(f"{folder} lacks {name!r}, which its manifest lists")
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise ModelFolderError(f"{folder / name} cannot be read: {error.strerror}") from None
        if found != digest:
            raise ModelFolderError(
                f"{folder / name} has sha256 {found[:12]}..., its manifest says {digest[:12]}...; the folder is "
                "mixed or damaged"
            )


def sha256(path: Path) -> str:
    """The digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
