"""The folder that `dist-attn encode-corpus` fills; readers of Arrow pass over what begins with `_`. No torch.

    OUT/part-….parquet    rows of some documents, each whole; a part appears at once or not at all
    OUT/_failed.parquet   the documents that the last job could not read, with the reason
    OUT/_manifest.json    the model and the settings of all rows

A part's name comes of its documents, so a worker that outlives its job writes what its successor does.
"""

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, final

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.commands.corpus_inputs import Document, Location
from dist_attn.commands.row_files import About, FileRows, ParquetRows, vector_column
from dist_attn.errors import InputError, StorageError
from dist_attn.wire.choices import Precision

WRITING = ".writing"  # the end of the name of a file that is not complete
ROWS_AT_ONCE = 2048


class CorpusSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of one job, as its workers get them; `long_ranks` ranks read each document from `long_bytes` on."""

    out: str
    model: str
    granularity: str
    window: int | None
    pooling: str | None
    text: str
    id: str
    with_text: bool
    embedding: Literal["float32", "float16", "int8"]
    device: str
    dtype: Precision
    long_bytes: int = 0
    long_ranks: int = 0


class Unit(msgspec.Struct, frozen=True):
    """The documents of one part."""

    name: str
    documents: list[Document]


class UnitReport(msgspec.Struct, frozen=True):
    """The counts of a part, why documents failed, and the precision that its rows were `computed` in."""

    rows: int = 0
    tokens: int = 0
    failed: dict[str, str] = {}
    computed: str = ""


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's answer: the bytes of input that it has `done` of a unit, its report, or an error that ends the job."""

    done: int = 0
    report: UnitReport | None = None
    error: str = ""


class PartError(StorageError):
    """A file that cannot be written, which is no fault of a document."""


@final
class PartWriter(ParquetRows):
    """The rows of some documents, which can be taken back until they are in the file."""

    def __init__(self, file: IO[bytes], settings: CorpusSettings) -> None:
        super().__init__(file, About("", settings.with_text))
        self._embedding, self._flushed, self.tokens = settings.embedding, "", 0

    def write_document(self, document: str, rows: Iterable[FileRows]) -> None:
        """Append the rows of a document. Raises: PartError; what `rows` raises."""
        first = 0
        for some in rows:
            self.write(dataclasses.replace(some, document=document, first=first))
            first += len(some.vectors_ND)

    def drop(self, document: str) -> bool:
        """Take out the rows of a document; returns False where some are in the file already."""
        kept = [some for some in self._waiting if some.document != document]
        self.rows -= sum(len(some.vectors_ND) for some in self._waiting) - sum(len(some.vectors_ND) for some in kept)
        self._waiting = kept
        return self._flushed != document

    def _flush(self) -> None:
        if self._waiting:
            self._flushed = self._waiting[-1].document
            self.tokens += sum(int(some.ranges_N4[-1, 1] - some.ranges_N4[0, 0]) for some in self._waiting)
            try:
                super()._flush()
            except OSError as error:
                raise PartError(f"rows cannot be written: {error}") from None

    def _batch(self, rows: Sequence[FileRows]) -> Any:
        import pyarrow

        counts = [len(some.vectors_ND) for some in rows]
        names = np.repeat(np.array([some.document for some in rows], dtype=object), counts)
        ranges_N4 = np.concatenate([some.ranges_N4 for some in rows])
        vectors_ND = np.concatenate([some.vectors_ND for some in rows], dtype=np.float32)
        sections = [one for some, count in zip(rows, counts, strict=True) for one in some.sections or [None] * count]
        columns = {
            "doc": pyarrow.array(names, pyarrow.string()),
            "row": np.concatenate([some.first + np.arange(len(some.vectors_ND)) for some in rows]),
            "byte_start": ranges_N4[:, 2],
            "byte_stop": ranges_N4[:, 3],
            "tokens": (ranges_N4[:, 1] - ranges_N4[:, 0]).astype(np.int32),
            "section": pyarrow.array(sections, pyarrow.string()),
        }
        if self._about.with_text:
            texts = [text for some in rows for text in some.texts or ()]
            columns["text"] = pyarrow.array(texts, pyarrow.large_string())
        if self._embedding == "int8":  # the largest number of a vector is 127 times its scale
            scale_N1 = np.maximum(np.abs(vectors_ND).max(axis=1, keepdims=True), 1e-30) / 127
            columns["scale"] = scale_N1[:, 0]
            vectors_ND = np.rint(vectors_ND / scale_N1)
        return pyarrow.RecordBatch.from_pydict(
            columns | {"embedding": vector_column(vectors_ND.astype(self._embedding))}
        )


@contextmanager
def written(target: Location) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well: on this disk by renaming it, elsewhere by sending it.

    One to which nothing was written gets none. Raises: PartError.
    """
    from pyarrow import fs

    folder, _, name = target.path.rpartition("/")
    temporary = Path(tempfile.gettempdir() if target.scheme else folder, f".{name}.{os.getpid()}{WRITING}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not temporary.stat().st_size:
            return
        if target.scheme:
            try:
                fs.copy_files(str(temporary), target.path, destination_filesystem=target.filesystem)
            except BaseException:
                with suppress(OSError):  # half of it would have the name of all
                    target.filesystem.delete_file(target.path)
                raise
        else:
            temporary.rename(target.path)
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)  # else the name may be gone after the power is
            os.close(descriptor)
    except OSError as error:
        raise PartError(f"{target.name} cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def vectors_of(batch: Any) -> npt.NDArray[np.float32]:
    """The vectors of a batch, [N, D]."""
    column = batch.column("embedding")
    vectors_ND: npt.NDArray[np.float32] = column.flatten().to_numpy().reshape(len(batch), -1).astype(np.float32)
    if "scale" in batch.schema.names:
        vectors_ND *= batch.column("scale").to_numpy()[:, None]
    return vectors_ND


def batches_of(place: Location, columns: Sequence[str]) -> Iterator[Any]:
    """The record batches of a part, of these columns as far as it has them.

    Raises: InputError for a file that is no part, or is damaged.
    """
    from pyarrow import parquet

    try:
        with place.filesystem.open_input_file(place.path) as opened, parquet.ParquetFile(opened) as file:
            has = set(file.schema_arrow.names)
            yield from file.iter_batches(ROWS_AT_ONCE, columns=[name for name in columns if name in has])
    except (OSError, ValueError) as error:
        raise InputError(f"{place.name} cannot be read as a part: {error}; remove it, and encode again") from None
