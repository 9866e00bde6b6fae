"""What is not plain text: told by its first bytes or its media type, with the command that makes text of it."""

import gzip
import io
import zipfile

import pytest

from dist_attn.text.plain import HEAD_BYTES, may_be_other, refusal_of


def zipped(*entries: tuple[str, bytes]) -> bytes:
    """A ZIP file with these entries, as they are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return file.getvalue()


OTHERS = {
    "PDF": (b"%PDF-1.7\n%\xe2\xe3", "pdftotext book.pdf book.txt"),
    "EPUB": (zipped(("mimetype", b"application/epub+zip"), ("text", b"x" * 2000)), "pandoc -t plain book.epub"),
    "OpenDocument": (zipped(("mimetype", b"application/vnd.oasis.opendocument.text")), "pandoc -t plain book.odt"),
    "DOCX": (zipped(("[Content_Types].xml", b"<Types/>")), "pandoc -t plain book.docx"),
    "ZIP": (zipped(("a.txt", b"It was")), "unzip"),
    "(DOC)": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(50), "soffice"),
    "RTF": (b"{\\rtf1\\ansi It was}", "pandoc -t plain book.rtf"),
    "gzip": (gzip.compress(b"It was"), "gunzip"),
    "UTF-16": ("It was".encode("utf-16"), "iconv -f utf-16 -t utf-8"),
    "UTF-32": ("It was".encode("utf-32"), "iconv -f utf-32 -t utf-8"),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(20), "tesseract"),
    "HTML": (b"\xef\xbb\xbf \r\n<!-- a page --><!DOCTYPE HTML><html><p>It was</html>", "pandoc -f html -t plain"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_told_with_the_command_that_helps(name: str) -> None:
    """The words name the kind and a command; no beginning of the file passes for a whole one's."""
    data, command = OTHERS[name]
    words = refusal_of(data[:HEAD_BYTES])
    assert words is not None and name in words and command in words
    told = next(count for count in range(len(data) + 1) if refusal_of(data[:count]) is not None)
    assert all(may_be_other(data[:count]) for count in range(told))


@pytest.mark.parametrize(
    "text",
    ["It was", "", "  \n", "<TEI>It was</TEI>", "On <html> and <!doctype html>", "PK or not", "%PD", "{\\r}", "añ"],
)
def test_plain_text_passes(text: str) -> None:
    """Words about HTML are no web page, and marks of another kind are none."""
    assert refusal_of(text.encode()) is None


def test_most_text_is_not_waited_for() -> None:
    """A few bytes are enough for what begins with a letter."""
    assert not any(map(may_be_other, (b"It", b"PX", b"Gi", b"  A", "ü".encode(), b"{\n", b"(a")))


@pytest.mark.parametrize(
    ("media_type", "found"),
    [
        ("application/pdf", "a PDF"),
        ("application/epub+zip", "an EPUB"),
        ("application/vnd.openxmlformats-officedocument.wordprocessingml.document", "an Office document"),
        ("text/html", "a web page"),
        ("text/rtf", "RTF"),
        ("image/webp", "an image"),
        ("text/plain", None),
        ("text/markdown", None),
        ("application/octet-stream", None),
        ("", None),
    ],
)
def test_a_media_type_is_enough(media_type: str, found: str | None) -> None:
    """What a client says that it sends is believed before a byte has come."""
    words = refusal_of(b"", media_type)
    assert words is None if found is None else words is not None and found in words
