"""The files of the web page: read once at start, known by their exact addresses, and open to everybody."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["PAGE_FILES", "PAGE_HEADERS", "PageFile"]

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
START = "/"
PREFIX = "/page/"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types page-worker"
)
PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 while it is the same
}
"""What every file of the page is sent with: nothing from elsewhere is loaded, and nobody frames it."""


@dataclass(frozen=True)
class PageFile:
    """One file: its bytes, what they are, and the entity tag that names them."""

    data: bytes
    media_type: str
    etag: str


def _read(folder: Traversable, prefix: str) -> dict[str, PageFile]:
    found: dict[str, PageFile] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{prefix}{entry.name}/")
        elif kind := MEDIA_TYPES.get(entry.name.rpartition(".")[2]):
            data = entry.read_bytes()
            address = START if prefix + entry.name == f"{PREFIX}index.html" else prefix + entry.name
            found[address] = PageFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


PAGE_FILES = _read(files("dist_attn_service") / "page", PREFIX)
"""By path: `/` is the page itself. Nothing but these addresses is answered without a key."""
