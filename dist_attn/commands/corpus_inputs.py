"""The documents of a corpus: files, folders, patterns, lines of JSONL, rows of Parquet, here or in buckets. No torch.

Files are reached by pyarrow's file systems, so `s3://` and `gs://` take their keys and addresses from the environment.
"""

import fnmatch
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from dist_attn.errors import InputError, MissingExtraError, extra_hint
from dist_attn.text.documents import Extracted, open_text

LONGEST_LINE = 256 << 20  # bytes: a document in a table lies in memory
ROWS_AT_ONCE = 64  # of Parquet
_LINES = re.compile(r"\.(jsonl|ndjson)(\.gz|\.bz2|\.zst)?$", re.IGNORECASE)


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """One text on its way to a worker: in the file `uri`, or `text` itself; `refusal` says why there is none.

    `size` is its share of the input, in bytes.
    """

    name: str
    size: int
    uri: str = ""
    text: str | None = None
    refusal: str = ""


class Location(NamedTuple):
    """A path on a file system of pyarrow; `scheme` is "" on this disk, `query` what follows it in the URI."""

    filesystem: Any
    path: str
    scheme: str = ""
    query: str = ""

    @classmethod
    def of(cls, uri: str) -> "Location":
        """The place of a path or URI. Raises: InputError for one that no file system has, MissingExtraError."""
        try:
            from pyarrow import fs
        except ImportError:
            raise MissingExtraError(f"a corpus is read and written by pyarrow: {extra_hint('arrow')}") from None
        scheme, found, rest = uri.partition("://")
        if not found:
            return cls(fs.LocalFileSystem(), os.path.abspath(uri))
        try:
            filesystem, path = fs.FileSystem.from_uri(uri)
        except (OSError, ValueError) as error:
            raise InputError(f"{uri} cannot be reached: {error}") from None
        if scheme == "file":
            return cls(filesystem, path)
        return cls(filesystem, path, f"{scheme}://", "".join(rest.partition("?")[1:]))

    @property
    def name(self) -> str:
        """The path with its scheme, which names a document."""
        return self.scheme + self.path

    @property
    def real(self) -> str:
        """The name without links on the way to it."""
        return self.name if self.scheme else os.path.realpath(self.path)

    @property
    def uri(self) -> str:
        """The path or URI that `of` turns into this place; names in buckets may have blanks, "%" and "?"."""
        return f"{self.scheme}{quote(self.path)}{self.query}" if self.scheme else self.path

    def files(self) -> Iterator[tuple["Location", int]]:
        """The files here and their sizes: itself, those of a folder and its folders, or those that fit a pattern.

        They come in order; names that begin with a dot are left out, and links to folders are not followed.

        Raises: OSError; UnicodeError for a name that is not in UTF-8.
        """
        from pyarrow.fs import FileType

        info, base, pattern = self.filesystem.get_file_info(self.path), self.path, None
        if info.type == FileType.File:
            yield self, info.size
            return
        if info.type == FileType.NotFound and (wild := re.search(r"[*?\[]", base)):
            base, pattern = base[: wild.start()].rpartition("/")[0], re.compile(fnmatch.translate(base))
        for path, size in sorted(self._below(base)):
            if "/." not in path[len(base) :] and (pattern is None or pattern.match(path)):
                yield self._replace(path=path), size

    def _below(self, base: str) -> Iterator[tuple[str, int]]:
        """The paths and sizes of all files below a folder of this file system."""
        from pyarrow.fs import FileSelector, FileType

        if self.scheme:
            for one in self.filesystem.get_file_info(FileSelector(base, allow_not_found=True, recursive=True)):
                if one.type == FileType.File:
                    yield str(one.path), one.size
            return

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        # Not Arrow's list: it follows links, and one to a folder above it for ever.
        for folder, _, names in os.walk(base or "/", onerror=refuse):
            for path in (os.path.join(folder, name) for name in names):
                path.encode()  # Arrow takes names in UTF-8 alone
                if os.path.isfile(path):
                    yield path, os.stat(path).st_size


def find_files(inputs: Sequence[str]) -> list[tuple[Location, int]]:
    """All files of the inputs, each once, and their sizes. Raises: InputError for an input without any."""
    found: dict[str, tuple[Location, int]] = {}
    for name in inputs:
        try:
            own = {place.name: (place, size) for place, size in Location.of(name).files()}
        except (OSError, UnicodeError) as error:
            raise InputError(f"{name} cannot be listed: {error}") from None
        found |= own
        if not own:
            raise InputError(f"{name} is no file, and no folder or pattern with files; give what is to be encoded")
    return list(found.values())


def documents_of(files: Iterable[tuple[Location, int]], text: str, name: str) -> Iterator[Document]:
    """The documents of files, in order; in tables, texts and names stand in these columns (name "": the row's number).

    A table that cannot be read to its end gives one with a refusal last.
    """
    for place, size in files:
        table = _lines(place) if _LINES.search(place.path) else None
        if place.path.lower().endswith(".parquet"):
            table = _rows(place, size, [text, name])
        if table is None:
            yield Document(place.name, size, uri=place.uri)
            continue
        try:
            for number, (share, values) in enumerate(table):
                yield _document(f"{place.name}#{number}", share, values, text, name)
        except (OSError, ValueError, EOFError) as error:  # pyarrow's own errors are these
            yield Document(place.name, 0, refusal=f"the table cannot be read further: {error}")


def open_document(document: Document) -> Extracted:
    """Open the text of a document. Raises: InputError for one that is refused or empty; OSError."""
    if document.refusal:
        raise InputError(document.refusal)
    if document.text is not None:
        return open_text(io.BytesIO(document.text.encode()), "", piped=True)
    place = Location.of(document.uri)
    return open_text(place.filesystem.open_input_stream(place.path, compression=None), place.path)


def _lines(place: Location) -> Iterator[tuple[int, Any]]:
    """The lines of JSONL: their bytes, and what each holds, or why it cannot be read."""
    with io.BufferedReader(place.filesystem.open_input_stream(place.path, compression="detect"), 1 << 20) as file:
        while line := file.readline(LONGEST_LINE):
            size = len(line)
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
                size += len(line)
            if size == len(line) and not line.strip():  # blank
                continue
            try:
                yield size, msgspec.json.decode(line) if size <= LONGEST_LINE else f"it has {size} bytes"
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                yield size, f"the line is no JSON: {error}"


def _rows(place: Location, size: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file: the share of the file, and the columns, of each."""
    from pyarrow import parquet

    with place.filesystem.open_input_file(place.path) as opened, parquet.ParquetFile(opened) as file:
        wanted, share = set(columns) & set(file.schema_arrow.names), size // max(1, file.metadata.num_rows)
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=sorted(wanted)):
            yield from ((share, values) for values in batch.to_pylist())


def _document(number: str, size: int, values: Any, text: str, name: str) -> Document:
    """The document of a row of a table."""
    if not isinstance(values, dict):
        return Document(number, size, refusal=values if isinstance(values, str) else "the line is no JSON object")
    own, found = values.get(name, None if name else number), values.get(text)
    if not isinstance(own, str | int):
        return Document(number, size, refusal=f"there is no name in {name!r}, which --set id gives")
    if not isinstance(found, str):
        return Document(str(own), size, refusal=f"there is no text in {text!r}: name where it is by --set text=NAME")
    return Document(str(own), size, text=found)
