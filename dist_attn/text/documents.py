"""Plain text, with its sections, of Markdown, and by a bounded process of web pages, PDFs, EPUBs and DOCX files.

    python -m dist_attn.text.documents KIND

reads the file on stdin, and writes a JSON line (`_Head`) and then the text to stdout.
"""

import errno
import importlib.util
import io
import os
import re
import resource
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import IO, NamedTuple, cast

import msgspec

from dist_attn.bounded_process import bound_here, limit, run_bounded
from dist_attn.errors import InputError, extra_hint
from dist_attn.text.plain import HEAD_BYTES, extracted_as, only_names_html, refusal_of

__all__ = ["Extracted", "Section", "open_text", "read_answer", "refusal_of_kind", "refusal_or_need", "sections_at"]

LIBRARY = "kreuzberg"
MOST_FILE, MOST_TEXT = 1 << 30, 64 << 20  # bytes
MOST_ANSWER = 2 * MOST_TEXT  # with its sections
MEMORY_BYTES = 4 << 30
MOST_SECONDS = 120.0  # of the processor's time
WALL_SECONDS = 1200.0  # on a busy machine
LABEL, MOST_SECTIONS = 200, 1 << 16  # characters of a section's name, and those that are told
_MARKDOWN, _EPUB = "text/markdown", "application/epub+zip"
_BY_NAME = {".md": _MARKDOWN, ".markdown": _MARKDOWN, ".epub": _EPUB}  # of archives, some hide what they are
_PAGES = dict.fromkeys((".html", ".htm", ".xhtml"), "text/html")
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset=[\"' ]{0,3}([\w-]{1,40})", re.IGNORECASE)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.{1,1000})", re.MULTILINE)  # in linear time: nothing follows what it takes


Section = tuple[int, str]  # the byte of a text at which it begins, and its name


class Extracted(NamedTuple):
    """A text in UTF-8, and its sections in order."""

    file: IO[bytes]
    sections: list[Section]


def sections_at(sections: Sequence[Section], places: Iterable[int]) -> list[str | None]:
    """The names of the sections in which bytes lie, None before the first."""
    found = (bisect_right(sections, place, key=lambda section: section[0]) for place in places)
    return [sections[at - 1][1] if at else None for at in found]


class _Head(msgspec.Struct):
    sections: list[Section] = []
    refusal: str = ""


def refusal_or_need(head: bytes, name: str) -> str | None:
    """Say why a file is refused whose text is not plain and cannot be taken out here; None for others."""
    return refusal_of_kind(head, _media_type(head, name))


def refusal_of_kind(head: bytes, kind: str) -> str | None:
    """Say the same of a file that is read as this kind, "" for plain text."""
    refusal = refusal_of(head)
    if not refusal or not kind:
        return refusal
    if importlib.util.find_spec(LIBRARY) is not None:
        return None
    return f"{refusal}; or install {LIBRARY}, which takes the text out: {extra_hint('documents')}"


def open_text(file: IO[bytes], name: str, *, piped: bool = False) -> Extracted:
    """The text of an open file: itself where it is plain or `piped`, else what can be taken out.

    Raises: InputError for an empty file, and for one of another kind or without text; the file is closed then.
    """
    buffered = io.BufferedReader(cast(io.RawIOBase, file))
    head = buffered.peek(HEAD_BYTES)[:HEAD_BYTES]
    refusal, kind = (None, "") if piped else (refusal_or_need(head, name), _media_type(head, name))
    if head and not refusal and not kind:
        return Extracted(buffered, [])
    with buffered:
        if refusal or not head:
            raise InputError(f"cannot be read: {refusal}" if head else "is empty; encoding needs at least one byte")
        return _extract(buffered, kind)


def _media_type(head: bytes, name: str) -> str:
    ending = PurePath(name).suffix.lower()
    told = "" if only_names_html(head, _PAGES.get(ending, "")) else extracted_as(head)
    return told or _BY_NAME.get(ending, "")


def _extract(file: IO[bytes], kind: str) -> Extracted:
    if kind == _MARKDOWN:  # needs no library, and many are short: a process takes half a second
        head, text = _answer(kind, file.read(MOST_TEXT + 1))
        if head.refusal:
            raise InputError(f"cannot be read: {head.refusal}")
        return Extracted(io.BytesIO(text), head.sections)
    answer = tempfile.TemporaryFile()  # noqa: SIM115 - whoever reads the text closes it
    try:
        with tempfile.TemporaryFile() as own:
            while piece := file.read(1 << 20):
                own.write(piece)
                if own.tell() > MOST_FILE:
                    raise InputError(f"has more than {MOST_FILE >> 20} MiB, which is as much as text is taken out of")
            own.seek(0)
            streams = {"stdin": own, "stdout": answer, "stderr": subprocess.DEVNULL}
            code = run_bounded(__name__, [kind], timeout_s=WALL_SECONDS, **streams).returncode
        return read_answer(code, answer)
    except (OSError, subprocess.TimeoutExpired) as error:
        answer.close()
        raise InputError(f"could not be read: {type(error).__name__}") from None
    except InputError:
        answer.close()
        raise


def read_answer(code: int, answer: IO[bytes]) -> Extracted:
    """The text in the answer of a process that takes it out, and that has ended with this exit code.

    Raises: InputError for a document that cannot be read, OSError where there was no room for the answer.
    """
    if code in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(code, os.strerror(code))
    if code:
        bound = f"{MOST_SECONDS:g} s of the processor, {MEMORY_BYTES >> 20} MiB of memory"
        raise InputError(f"cannot be read: that ends its process ({code}); it may take {bound}")
    answer.seek(0)
    try:
        head = msgspec.json.decode(answer.readline(), type=_Head)
    except msgspec.DecodeError as error:
        raise InputError(f"could not be read: {type(error).__name__}") from None
    if head.refusal:
        raise InputError(f"cannot be read: {head.refusal}")
    return Extracted(answer, head.sections)


# ---- in the process ------------------------------------------------------------------------------


def _parts(data: bytes, kind: str) -> Iterator[tuple[str, str]]:
    """The texts of pages or sections, and their names, "" before the first; all but pages are Markdown."""
    if kind == _MARKDOWN:
        text = data.decode(errors="replace")
    else:
        import kreuzberg

        paged = kind == "application/pdf"
        config = kreuzberg.ExtractionConfig(
            use_cache=False, enable_quality_processing=False, output_format="plain" if paged else "markdown",
            # Else it leaves out most of the paragraphs of some pages.
            html_options={"preprocessing": {"enabled": False}},
            content_filter=kreuzberg.ContentFilterConfig(
                include_headers=True, include_footers=True, strip_repeating_text=False
            ),
            pages=kreuzberg.PageConfig(extract_pages=paged),
        )  # fmt: skip
        result = kreuzberg.extract_bytes_sync(_page(data) if kind == "text/html" else data, kind, config)
        if paged:
            for page in result.pages or ():
                yield f"{page['content'].strip()}\n\n", f"page {page['page_number']}"
            return
        text = result.content
    at, name = 0, ""
    for match in _HEADING.finditer(text):
        yield text[at : match.start()], name
        at, name = match.start(), match[1].rstrip(" \t#")
    yield text[at:], name


def _page(data: bytes) -> bytes:
    """A web page in UTF-8, as the library takes it, without the head, which it would take for text."""
    declared = _CHARSET.search(data[:2048])
    try:
        text = data.decode(declared[1].decode() if declared else "utf-8", "replace")
    except LookupError:
        text = data.decode(errors="replace")
    begin, end = text.find("<head>"), text.find("</head>")
    return (text[:begin] + text[end:] if 0 <= begin < end else text).encode(errors="replace")


def _answer(kind: str, data: bytes) -> tuple[_Head, bytes]:
    head, text = _Head(), bytearray()
    try:
        for part, name in _parts(data, kind):
            if name and len(head.sections) < MOST_SECTIONS:
                head.sections.append((len(text), name[:LABEL]))
            text += part.encode(errors="replace")
        if len(text) > MOST_TEXT:
            raise ValueError(f"its text has more than {MOST_TEXT >> 20} MiB")
        if not text.strip():
            raise ValueError("it has no text; scanned pages are pictures: read them by OCR first")
    except Exception as error:  # a library may fail in any way on what is no such file
        return _Head(refusal=f"{type(error).__name__}: {error}"[:500]), b""
    return head, bytes(text)


def main() -> None:
    """Take out the text of stdin."""
    bound_here(MEMORY_BYTES, MOST_SECONDS)
    limit(resource.RLIMIT_FSIZE, MOST_ANSWER)
    head, text = _answer(sys.argv[1], sys.stdin.buffer.read())
    try:
        sys.stdout.buffer.write(msgspec.json.encode(head) + b"\n" + text)
        sys.stdout.buffer.flush()
    except OSError as error:
        os._exit(error.errno or 1)  # else Python flushes again, and its exit code says nothing


if __name__ == "__main__":
    main()
