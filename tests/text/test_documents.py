"""The text of documents that are not plain text, and what is refused, each by a process with bounds."""

import io
import subprocess
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from dist_attn.bounded_process import run_bounded
from dist_attn.errors import InputError
from dist_attn.text import documents
from dist_attn.text.documents import Extracted, open_text

pytestmark = pytest.mark.skipif(find_spec("kreuzberg") is None, reason="needs the extra documents")

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
CONTAINER = '<container><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>'
BOOK = (
    '<package><manifest><item id="a" href="one.xhtml"/><item id="b" href="two.xhtml"/></manifest>'
    '<spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
)
HTML = (
    b"<!doctype html><html><head><meta charset='latin-1'><title>t</title><script>no()</script></head>"
    b"<body><p>Caf\xe9.<h1>First part</h1>One&amp;two<p>Three"
)


def pdf(
    pages: int, stream: bytes = b"BT /F 12 Tf 9 9 Td (Words of page) Tj ET", extra: str = "", kids: str = ""
) -> bytes:
    """A PDF of pages that share one stream."""
    own = " ".join(f"{5 + at} 0 R" for at in range(pages))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {pages}/Kids[{kids or own}]>>".encode(),
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        *[b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 3 0 R/Resources<</Font<</F 4 0 R>>>>>>"] * pages,
    ]
    data, places = bytearray(b"%PDF-1.4\n"), []
    for number, one in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj" % number + one + b"endobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        size, table, size, len(data),
    )  # fmt: skip
    return bytes(data) + end


def archive(first: str, **files: str | bytes) -> bytes:
    """A ZIP archive that begins with a file of that name; `_` in the names of the others stands for `/`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        name, _, content = first.partition("=")
        file.writestr(zipfile.ZipInfo(name), content)
        for name, data in files.items():
            file.writestr(name.replace("__", "/").replace("DOT", "."), data)
    return made.getvalue()


def epub(**files: str | bytes) -> bytes:
    """An EPUB."""
    return archive("mimetype=application/epub+zip", **files)


def docx(body: str | bytes, head: str = "") -> bytes:
    """A DOCX file."""
    if isinstance(body, str):
        body = f'<?xml version="1.0"?>{head}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return archive("[Content_Types].xml=<Types/>", word__documentDOTxml=body)


def book(**files: str | bytes) -> bytes:
    """An EPUB with what every one has."""
    return epub(**{"META-INF__containerDOTxml": CONTAINER, "OPS__bookDOTopf": BOOK, **files})


def opened(tmp_path: Path, data: bytes, name: str = "file") -> Extracted:
    """The file with these bytes, opened as `encode` does."""
    path = tmp_path / name
    path.write_bytes(data)
    return open_text(io.FileIO(path), name)


GOOD = {
    "pdf": (lambda: pdf(2), "Words of page\n\nWords of page\n\n", [(0, "page 1"), (15, "page 2")]),
    "html": (lambda: HTML, "Café.\n\n# First part\n\nOne&two\n\nThree\n", [(8, "First part")]),
    "epub": (
        lambda: book(OPS__oneDOTxhtml="<p>A", OPS__twoDOTxhtml="<h2>B</h2>C"),
        "A\n\n## B\n\nC",
        [(3, "B")],
    ),
    "docx": (
        lambda: docx(
            '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Head</w:t></w:r></w:p>'
            "<w:p><w:r><w:t>One é</w:t></w:r></w:p>"
        ),
        "## Head\n\nOne é\n",
        [(0, "Head")],
    ),
    "notes.md": (lambda: b"Be\n# One #\ntext\n## Two\n", "Be\n# One #\ntext\n## Two\n", [(3, "One"), (16, "Two")]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_the_text_and_its_sections_are_taken_out(name: str, tmp_path: Path) -> None:
    """Paragraphs stand apart, and sections begin where pages, parts and headings do."""
    made, text, sections = GOOD[name]
    extracted = opened(tmp_path, made(), name)
    with extracted.file as file:
        assert (file.read().decode(), extracted.sections) == (text, sections)


LAUGHS = "<!DOCTYPE d [<!ENTITY a0 'ha'>" + "".join(f"<!ENTITY a{n + 1} '{f'&a{n};' * 10}'>" for n in range(9)) + "]>"
FILE = "<!DOCTYPE d [<!ENTITY f SYSTEM 'file:///etc/passwd'>]>"
ZEROS = bytes(1 << 27)
BAD: dict[str, Callable[[], bytes]] = {
    "a head of a PDF": lambda: b"%PDF-1.7\n",
    "half a PDF of noise": lambda: pdf(40)[:2000] + bytes(range(256)) * 200,
    "a PDF whose pages hold themselves": lambda: pdf(1, kids="2 0 R 2 0 R"),
    "a PDF without text": lambda: pdf(3, stream=b""),
    "an EPUB without a container": lambda: epub(x="y"),
    "an EPUB without its book": lambda: epub(**{"META-INF__containerDOTxml": CONTAINER}),
    "an EPUB without its chapters": lambda: book(),
    "an EPUB with a chapter elsewhere": lambda: book(OPS__bookDOTopf=BOOK.replace("one.xhtml", "../../../etc/passwd")),
    "an EPUB of 128 MiB of zeros": lambda: book(OPS__oneDOTxhtml=ZEROS, OPS__twoDOTxhtml=""),
    "an EPUB with a file for an entity": lambda: epub(**{"META-INF__containerDOTxml": f"{FILE}<c>&f;</c>"}),
    "a DOCX file without a document": lambda: archive("[Content_Types].xml=<Types/>", xl__workbookDOTxml="<x/>"),
    "a DOCX file of 128 MiB of zeros": lambda: docx(ZEROS),
    "half a DOCX file": lambda: docx("<w:p/>" * 10_000)[:200],
    "a DOCX file of a billion laughs": lambda: docx("<w:p><w:r><w:t>&a9;</w:t></w:r></w:p>", LAUGHS),
    "a DOCX file with a file for an entity": lambda: docx("<w:p><w:r><w:t>&f;</w:t></w:r></w:p>", FILE),
    "a DOCX file a million levels deep": lambda: docx("<w:p>" * 1_000_000 + "</w:p>" * 1_000_000),
    "a DOCX file that is not well-formed": lambda: docx("<w:p>"),
    "a web page of a script": lambda: b"<html><script>var words</script>",
    "a web page of 70 MiB": lambda: b"<html><p>" + b"word " * (14 << 20),
}  # fmt: skip
QUICK = ("half a PDF of noise", "a DOCX file of 128 MiB of zeros", "a DOCX file of a billion laughs")


@pytest.mark.parametrize("what", [pytest.param(what, marks=[] if what in QUICK else pytest.mark.slow) for what in BAD])
def test_what_is_malformed_or_huge_is_refused(what: str, tmp_path: Path) -> None:
    """Bombs, cycles and halves end as a refusal in words, and no file of the machine is read into a text."""
    with pytest.raises(InputError, match=r"cannot be read"):
        opened(tmp_path, BAD[what]())


def test_markdown_is_read_here_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its headings are found without a process, even of a line of many `#`, and only so many are told."""
    monkeypatch.delattr(documents, "run_bounded")
    monkeypatch.setattr(documents, "MOST_SECTIONS", 3)
    data = b"# " + b"#" * 1_000_000 + b"x\n" + b"## a b ##\n" * 1000
    text = open_text(io.BytesIO(data), "notes.md")
    assert text.file.read() == data
    assert text.sections == [(1_000_004 + 10 * at, "a b") for at in range(3)]


def test_files_beside_the_user_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process imports nothing from the folder that the command is started in, which strangers' files may fill."""
    (tmp_path / "kreuzberg.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with open_text(io.BytesIO(HTML), "page.html").file as text:
        assert b"First part" in text.read()


@pytest.mark.slow
def test_a_pdf_of_ten_thousand_pages_is_read(tmp_path: Path) -> None:
    """Many pages are no fault; a page tree costs time linear in its size."""
    extracted = opened(tmp_path, pdf(10_000))
    with extracted.file:
        assert len(extracted.sections) == 10_000


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library does on a file, the processor's seconds are bounded, and the words say so."""
    monkeypatch.setattr(documents, "WALL_SECONDS", 0.01)
    with pytest.raises(InputError, match="could not be read: TimeoutExpired"):
        opened(tmp_path, pdf(1))


def test_a_full_disk_is_no_fault_of_the_document() -> None:
    """A process that finds no room for its answer says so, and not that the file cannot be read."""
    with open("/dev/full", "wb") as full:
        code = run_bounded(documents.__name__, ["text/html"], timeout_s=60, stdin=subprocess.DEVNULL, stdout=full)
    with pytest.raises(OSError, match="No space left"):
        documents.read_answer(code.returncode, io.BytesIO())


NAMES_HTML = b"<?xml version='1.0'?><doc><html>x</html> and <b>y</b></doc>"


@pytest.mark.parametrize("name", ["doc.xml", "doc.txt", "doc"])
def test_what_only_names_html_is_refused(name: str, tmp_path: Path) -> None:
    """Its text would be another one: it is a page only by what begins it, or by its name."""
    with pytest.raises(InputError, match="this is a web page"):
        opened(tmp_path, NAMES_HTML, name)
    with opened(tmp_path, NAMES_HTML, "page.xhtml").file as text:
        assert b"<" not in text.read()
