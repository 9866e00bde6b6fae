"""Files of rows, in the format that the ending of their name says: .npy, .jsonl, .arrow or .parquet.

All but .npy say of each row what it stands for, by the names that a service's answers have. It never loads torch.
"""

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, final

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.commands.encode_output import RowFile, check_target
from dist_attn.errors import InputError, MissingExtraError, extra_hint
from dist_attn.launchers import read_launch
from dist_attn.text.documents import refusal_or_need
from dist_attn.text.plain import HEAD_BYTES
from dist_attn.wire.floats import shortest_float32

ENDINGS = (".npy", ".jsonl", ".arrow", ".parquet")
RANGES = ("start", "stop", "byte_start", "byte_stop")
FLOATS_AT_ONCE = 1 << 15  # of JSON
GROUP_BYTES = 8 << 20  # of vectors and texts in a record batch or row group


@dataclass(frozen=True)
class FileRows:
    """Rows of one document that follow each other, and their texts where these are asked for.

    `sections` are the names of those in which they begin, where the document's kind has any. In a file of many
    documents, `document` is theirs, and `first` the number of the first of them.

    Shapes: ranges [N, 4] int64, of each row start and stop in tokens, then in bytes; vectors [N, D] float32.
    """

    ranges_N4: npt.NDArray[np.int64]
    vectors_ND: npt.NDArray[np.float32]
    texts: list[str] | None = None
    sections: list[str | None] | None = None
    document: str = ""
    first: int = 0


@dataclass(frozen=True)
class About:
    """The facts of a file besides its rows: the document's name for each row, and metadata of the whole file."""

    document: str
    with_text: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


def check_rows_file(target: Path, source: Path, *, with_text: bool) -> None:
    """Refuse, before any work, a file for the rows of `source` that could not be written.

    Raises: InputError for a name whose ending is no format, or whose format has no texts, and as `check_target`;
        MissingExtraError for one that needs pyarrow.
    """
    check_target(target, source)
    ending = target.suffix.lower()
    if ending not in ENDINGS:
        other = "; of NumPy's formats that is .npy" if ending == ".npz" else ""
        raise InputError(
            f"--out is {target}, and its ending says how rows are written: take one of {', '.join(ENDINGS)}{other}"
        )
    if with_text and ending == ".npy":
        raise InputError(
            f"--with-text was given, and {target} has room for vectors only: take .jsonl, .arrow, .parquet"
        )
    if ending in (".arrow", ".parquet") and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError(
            f"{target} needs pyarrow, which is not installed: {extra_hint('arrow')}, or take .npy or .jsonl"
        )


def check_text(file: Path) -> None:
    """Raises: InputError for a file that is not there, or whose first bytes say that it is something else.

    A pipe is read as it is. Of ranks that a launcher has started, on several hosts maybe, only the first reads it.
    """
    if read_launch(os.environ) is None:
        try:
            os.stat(file)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from None
    if not os.path.isfile(file):
        return
    with suppress(OSError), file.open("rb") as opened:
        if (words := refusal_or_need(opened.read(HEAD_BYTES), file.name)) is not None:
            raise InputError(f"{file}: {words} (what is piped into encode /dev/stdin is read as it is)")


def open_rows(target: Path, about: About, file: IO[bytes]) -> "RowsWriter":
    """Make the writer of rows into `file` for the ending of `target`, which `check_rows_file` has let pass."""
    kinds: dict[str, type[RowsWriter]] = dict(zip(ENDINGS, (_Npy, _JsonLines, _Arrow, ParquetRows), strict=True))
    return kinds[target.suffix.lower()](file, about)


class RowsWriter(ABC):
    """A writer that takes the rows of one document in order."""

    def __init__(self, file: IO[bytes], about: About) -> None:
        self._file, self._about = file, about
        self.rows = 0
        self.finished = False

    def write(self, rows: FileRows) -> None:
        """Append rows; all have as many numbers as the first ones."""
        self._write(rows)
        self.rows += len(rows.vectors_ND)

    def finish(self) -> None:
        """Complete the file."""
        self._finish()
        self.finished = True

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of the file, complete or not."""

    @abstractmethod
    def _write(self, rows: FileRows) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


@final
class _Npy(RowsWriter):
    """A NumPy file of vectors alone."""

    def __init__(self, file: IO[bytes], about: About) -> None:
        super().__init__(file, about)
        self._vectors = RowFile(file)

    def _write(self, rows: FileRows) -> None:
        self._vectors.write(rows.vectors_ND)

    def _finish(self) -> None:
        self._vectors.finish()


@final
class _JsonLines(RowsWriter):
    """A JSON object on each line."""

    def _write(self, rows: FileRows) -> None:
        encode = msgspec.json.Encoder().encode_lines
        step = max(1, FLOATS_AT_ONCE // max(1, rows.vectors_ND.shape[1]))
        for first in range(0, len(rows.vectors_ND), step):
            some = slice(first, first + step)
            texts = None if rows.texts is None else rows.texts[some]
            lines = []
            for place, (ranges, vector) in enumerate(
                zip(rows.ranges_N4[some].tolist(), shortest_float32(rows.vectors_ND[some]).tolist(), strict=True)
            ):
                line: dict[str, Any] = {"document": self._about.document, "index": self.rows + first + place}
                line |= zip(RANGES, ranges, strict=True)
                if rows.sections is not None:
                    line["section"] = rows.sections[first + place]
                if texts is not None:
                    line["text"] = texts[place]
                lines.append(line | {"embedding": vector})
            self._file.write(encode(lines))

    def _finish(self) -> None:
        pass


def vector_column(vectors_ND: npt.NDArray[Any]) -> Any:
    """The vectors as an array of Arrow's lists of one length."""
    import pyarrow

    numbers = pyarrow.array(vectors_ND.reshape(-1))
    item = pyarrow.field("item", numbers.type, nullable=False)
    return pyarrow.FixedSizeListArray.from_arrays(numbers, type=pyarrow.list_(item, vectors_ND.shape[1]))


class _Columns(RowsWriter):
    """Record batches of about GROUP_BYTES, however few rows come at a time."""

    def __init__(self, file: IO[bytes], about: About) -> None:
        super().__init__(file, about)
        self._waiting: list[FileRows] = []
        self._bytes = 0
        self._written = 0
        self._writer: Any = None

    def _write(self, rows: FileRows) -> None:
        self._waiting.append(rows)
        self._bytes += rows.vectors_ND.nbytes + sum(map(len, rows.texts or ()))
        if self._bytes >= GROUP_BYTES:
            self._flush()

    def _finish(self) -> None:
        if self._waiting or self._writer is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        # The width of a text without rows is not known, and pyarrow divides by it.
        batch = self._batch(self._waiting or [FileRows(np.empty((0, 4), np.int64), np.empty((0, 1), np.float32))])
        if self._writer is None:
            self._writer = self._open(batch.schema)
        self._writer.write_batch(batch)
        self._written += len(batch)
        self._waiting.clear()
        self._bytes = 0

    def _batch(self, rows: Sequence[FileRows]) -> Any:
        import pyarrow

        vectors_ND = np.concatenate([some.vectors_ND for some in rows], dtype=np.float32)
        ranges_N4 = np.concatenate([some.ranges_N4 for some in rows])
        count = len(vectors_ND)
        columns = {
            "document": pyarrow.repeat(pyarrow.scalar(self._about.document, pyarrow.string()), count),
            "index": pyarrow.array(np.arange(self._written, self._written + count, dtype=np.int64)),
            **{name: pyarrow.array(np.ascontiguousarray(ranges_N4[:, at])) for at, name in enumerate(RANGES)},
        }
        if rows[0].sections is not None:
            sections = [section for some in rows for section in some.sections or ()]
            columns["section"] = pyarrow.array(sections, pyarrow.string())
        if self._about.with_text:
            texts = [text for some in rows for text in some.texts or ()]
            columns["text"] = pyarrow.array(texts, pyarrow.large_string())
        columns["embedding"] = vector_column(vectors_ND)
        fields = [pyarrow.field(name, column.type, nullable=name == "section") for name, column in columns.items()]
        schema = pyarrow.schema(fields, metadata=dict(self._about.metadata))
        return pyarrow.RecordBatch.from_arrays(list(columns.values()), schema=schema)

    @abstractmethod
    def _open(self, schema: Any) -> Any: ...


@final
class _Arrow(_Columns):
    """A file in Arrow's file format."""

    def _open(self, schema: Any) -> Any:
        from pyarrow import ipc

        return ipc.new_file(self._file, schema)


class ParquetRows(_Columns):
    """A Parquet file with a row group for each batch."""

    def close(self) -> None:
        """Mark the writer as closed: else it would try to complete the file when it is thrown away."""
        if self._writer is not None:
            self._writer.is_open = False

    def _open(self, schema: Any) -> Any:
        from pyarrow import parquet

        return parquet.ParquetWriter(self._file, schema)
