"""Refusals of what is not plain text, by its first bytes or media type, and the way to make plain text of it."""

import re
from dataclasses import dataclass

__all__ = ["HEAD_BYTES", "extracted_as", "may_be_other", "only_names_html", "refusal_of"]

HEAD_BYTES = 1024
"""The number of first bytes that tell what a file is."""

_HTML = re.compile(rb"<(!doctype\s+html|html)[\s>]", re.IGNORECASE)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class _Kind:
    """A kind of file: what begins it, what its first KiB holds besides, and the command that makes plain text of it."""

    name: str
    command: str
    magic: tuple[bytes, ...]
    media_types: tuple[str, ...] = ()
    holds: bytes = b""
    extracted: str = ""  # its media type, where `text.documents` takes the text out


_OFFICE = "application/vnd.openxmlformats-officedocument"
_UTF16 = "iconv -f utf-16 -t utf-8 book.txt > book-utf8.txt"
# The first that fits counts: a ZIP file is told by what it holds, and UTF-32 begins as UTF-16 does.
_KINDS = (
    _Kind(
        "a PDF", "pdftotext book.pdf book.txt", (b"%PDF-",), ("application/pdf", "application/x-pdf"),
        extracted="application/pdf",
    ),
    _Kind(
        "an EPUB", "pandoc -t plain book.epub -o book.txt", (b"PK\x03\x04",),
        ("application/epub+zip",), holds=b"application/epub+zip", extracted="application/epub+zip",
    ),
    _Kind(
        "an OpenDocument file", "pandoc -t plain book.odt -o book.txt", (b"PK\x03\x04",),
        ("application/vnd.oasis.opendocument",), holds=b"application/vnd.oasis.opendocument",
    ),
    _Kind(
        "an Office document (DOCX)", "pandoc -t plain book.docx -o book.txt", (b"PK\x03\x04",),
        (_OFFICE,), holds=b"[Content_Types].xml", extracted=f"{_OFFICE}.wordprocessingml.document",
    ),
    _Kind(
        "an Office document (DOCX)", "pandoc -t plain book.docx -o book.txt", (b"PK\x03\x04",), holds=b"word/",
        extracted=f"{_OFFICE}.wordprocessingml.document",
    ),
    _Kind("a ZIP archive", "unzip book.zip", (b"PK\x03\x04", b"PK\x05\x06"), ("application/zip",)),
    _Kind(
        "an old Office document (DOC)", "soffice --convert-to txt:Text book.doc",
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",), ("application/msword",),
    ),
    _Kind("an RTF document", "pandoc -t plain book.rtf -o book.txt", (b"{\\rtf",), ("application/rtf", "text/rtf")),
    _Kind("compressed with gzip", "gunzip book.txt.gz", (b"\x1f\x8b",), ("application/gzip", "application/x-gzip")),
    _Kind("compressed with xz", "unxz book.txt.xz", (b"\xfd7zXZ\x00",), ("application/x-xz",)),
    _Kind("compressed with zstd", "unzstd book.txt.zst", (b"\x28\xb5\x2f\xfd",), ("application/zstd",)),
    _Kind(
        "text in UTF-32", "iconv -f utf-32 -t utf-8 book.txt > book-utf8.txt",
        (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"),
    ),
    _Kind("text in UTF-16", _UTF16, (b"\xff\xfe", b"\xfe\xff")),
    _Kind("an image", "tesseract page.png page", (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8"), ("image/",)),
)  # fmt: skip
_WEB_PAGE = _Kind(
    "a web page (HTML)", "pandoc -f html -t plain page.html -o page.txt", (b"<",), ("text/html", "application/xhtml"),
    extracted="text/html",
)  # fmt: skip


def refusal_of(head: bytes, media_type: str = "") -> str | None:
    """Say why a file is refused that is not plain text; None where nothing speaks against it.

    `head` are its first bytes, at least HEAD_BYTES of them unless it is shorter; `media_type` is in lower case,
    "" where it is not known. What begins with a tag and names HTML in `head` is a web page.
    """
    for kind in (*_KINDS, _WEB_PAGE):
        if media_type and media_type.startswith(kind.media_types):
            return _words(kind)
    found = _kind_of(head)
    return None if found is None else _words(found)


def extracted_as(head: bytes, media_type: str = "") -> str:
    """The media type, by its first bytes or else a declared one, of a file whose text `text.documents` takes out."""
    kinds = [kind for kind in (*_KINDS, _WEB_PAGE) if media_type and media_type.startswith(kind.media_types)]
    found = _kind_of(head) or next(iter(kinds), None)
    return "" if found is None else found.extracted


def only_names_html(head: bytes, media_type: str = "") -> bool:
    """Return whether a file that names HTML is a page neither by its type nor by what begins it: XML or code may be."""
    is_page = media_type.startswith(_WEB_PAGE.media_types) or _HTML.match(_text_of(head))
    return not is_page and _kind_of(head) is _WEB_PAGE


def _kind_of(head: bytes) -> _Kind | None:
    for kind in _KINDS:
        if head.startswith(kind.magic) and kind.holds in head:
            return kind
    return _WEB_PAGE if _text_of(head).startswith(b"<") and _HTML.search(head) else None


def may_be_other(head: bytes) -> bool:
    """Return whether more bytes are needed to tell: these begin as something else than plain text does."""
    begun = any(magic.startswith(head[: len(magic)]) for kind in _KINDS for magic in kind.magic)
    return begun or _BYTE_ORDER_MARK.startswith(head) or b"<".startswith(_text_of(head)[:1])


def _text_of(head: bytes) -> bytes:
    return head.removeprefix(_BYTE_ORDER_MARK).lstrip()


def _words(kind: _Kind) -> str:
    return f"this is {kind.name}, and dist-attn reads plain text in UTF-8; make it first, as with `{kind.command}`"
