"""Rows of an answer as bytes, in the formats that a client may choose: NDJSON, a file of NumPy, an Arrow stream."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, final

import msgspec
import numpy as np

from dist_attn.errors import MissingExtraError, extra_hint
from dist_attn.text.documents import Section, sections_at
from dist_attn.wire.floats import shortest_float32
from dist_attn.wire.messages import RowSpec
from dist_attn_api.types import EncodingSummary
from dist_attn_service.base.errors import BadRequest, Code, EngineFailure, ServiceError
from dist_attn_service.encodings.encoding_run import RowBlock


@dataclass(frozen=True)
class RowsAhead:
    """The facts known before the first row: numbers in a row, the count of rows or None, and what was asked for.

    `sections` are those of the document, where its kind has any.
    """

    dim: int
    count: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()

    @classmethod
    def of(
        cls, spec: RowSpec, model: str, dim: int, first_row: int, count: int | None, sections: Sequence[Section]
    ) -> Self:
        """The facts of the rows from `first_row` on; `count` is of all rows of the document."""
        about = {
            "model": model,
            "granularity": spec.granularity,
            "window": str(spec.window),
            "pooling": spec.pooling,
            "from_row": str(first_row),
        }
        return cls(dim, None if count is None else max(0, count - first_row), about, sections)


class RowFormat(ABC):
    """Rows of one answer as bytes. Every call may take some milliseconds and is made from one thread at a time."""

    media_type: ClassVar[str]
    needs_count: ClassVar[bool] = False
    """True where the bytes before the first row hold the number of rows."""
    breaks_off: ClassVar[bool] = True
    """True where an answer that fails breaks off: the connection is closed without the end of the body."""

    def __init__(self, ahead: RowsAhead) -> None:
        self.ahead = ahead

    @property
    def length(self) -> int | None:
        """The bytes of the whole answer, where they are known beforehand."""
        return None

    @abstractmethod
    def head(self) -> bytes:
        """The bytes before the first row."""

    @abstractmethod
    def rows(self, block: RowBlock) -> bytes:
        """The next rows."""

    @abstractmethod
    def end(self, summary: EncodingSummary) -> bytes:
        """The bytes after the last row of an answer that is complete."""

    @abstractmethod
    def failed(self, error: ServiceError) -> bytes:
        """The bytes after the last row of an answer that failed."""


class RowLine(msgspec.Struct):
    """One line of the answer; ranges are in tokens and bytes of the input, stops exclusive."""

    index: int
    start: int
    stop: int
    byte_start: int
    byte_stop: int
    embedding: list[float]
    section: str | msgspec.UnsetType | None = msgspec.UNSET


def format_rows(block: RowBlock, sections: Sequence[Section] = ()) -> bytes:
    """The rows as lines of NDJSON, with their sections where the document has any."""
    values = shortest_float32(block.vectors_ND).tolist()
    names = sections_at(sections, block.ranges_N4[:, 2].tolist()) if sections else [msgspec.UNSET] * len(block)
    lines = [
        RowLine(index, start, stop, begin, end, vector, name)
        for index, ((start, stop, begin, end), vector, name) in enumerate(
            zip(block.ranges_N4.tolist(), values, names, strict=True), block.first_row
        )
    ]
    return msgspec.json.Encoder().encode_lines(lines)


@final
class NdjsonFormat(RowFormat):
    """Lines of text."""

    media_type: ClassVar[str] = "application/x-ndjson"
    breaks_off: ClassVar[bool] = False

    def head(self) -> bytes:
        """No bytes: lines need no head."""
        return b""

    def rows(self, block: RowBlock) -> bytes:
        """A line per row."""
        return format_rows(block, self.ahead.sections)

    def end(self, summary: EncodingSummary) -> bytes:
        """The line with the summary."""
        return msgspec.json.encode(summary) + b"\n"

    def failed(self, error: ServiceError) -> bytes:
        """The line with the error."""
        return error.line()


@final
class NpyFormat(RowFormat):
    """Little-endian float32 [rows, dim] in C order, format version 1.0. An answer that ends early is too short."""

    media_type: ClassVar[str] = "application/x-npy"
    needs_count: ClassVar[bool] = True

    def __init__(self, ahead: RowsAhead) -> None:
        super().__init__(ahead)
        assert ahead.count is not None
        self._count = ahead.count
        self._written = 0
        header = {"descr": "<f4", "fortran_order": False, "shape": (ahead.count, ahead.dim)}
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, header)
        self._head = file.getvalue()

    @property
    def length(self) -> int:
        """Header and vectors."""
        return len(self._head) + 4 * self._count * self.ahead.dim

    def head(self) -> bytes:
        """The header."""
        return self._head

    def rows(self, block: RowBlock) -> bytes:
        """The vectors of the rows.

        Raises: EngineFailure for more rows than the header has promised.
        """
        self._written += len(block)
        if self._written > self._count:
            raise EngineFailure(f"the engine sent {self._written} rows where {self._count} were due")
        return np.ascontiguousarray(block.vectors_ND, dtype="<f4").tobytes()

    def end(self, summary: EncodingSummary) -> bytes:
        """Check the number of rows; no bytes follow them.

        Raises: EngineFailure for fewer rows than the header has promised.
        """
        if self._written != self._count:
            raise EngineFailure(f"the engine sent {self._written} rows where {self._count} were due")
        return b""

    def failed(self, error: ServiceError) -> bytes:
        """No bytes: the answer is then shorter than its Content-Length."""
        return b""


SUMMARY_KEY, ERROR_KEY = "dist_attn.summary", "dist_attn.error"
RANGES = ("start", "stop", "byte_start", "byte_stop")


@final
class ArrowFormat(RowFormat):
    """Columns index, start, stop, byte_start and byte_stop (int64), maybe section, embedding (a list of dim float32).

    The schema's metadata says what was asked for. The first of these formats loads pyarrow.
    """

    media_type: ClassVar[str] = "application/vnd.apache.arrow.stream"

    def __init__(self, ahead: RowsAhead) -> None:
        """Raises: MissingExtraError without pyarrow."""
        super().__init__(ahead)
        try:
            import pyarrow
            import pyarrow.ipc
        except ImportError:
            raise MissingExtraError(
                f"format=arrow needs pyarrow, which is not installed where this service runs: {extra_hint('arrow')} "
                "there, or take another format"
            ) from None
        self._arrow: Any = pyarrow
        whole = pyarrow.int64()
        vector = pyarrow.list_(pyarrow.field("item", pyarrow.float32(), nullable=False), ahead.dim)
        fields = [pyarrow.field(name, whole, nullable=False) for name in ("index", *RANGES)]
        if ahead.sections:
            fields.append(pyarrow.field("section", pyarrow.string()))
        fields.append(pyarrow.field("embedding", vector, nullable=False))
        self._schema = pyarrow.schema(fields, metadata=dict(ahead.about))
        self._file = io.BytesIO()
        self._writer = pyarrow.ipc.new_stream(self._file, self._schema)

    def head(self) -> bytes:
        """The schema."""
        return self._taken()

    def rows(self, block: RowBlock) -> bytes:
        """A record batch."""
        self._write(block, None)
        return self._taken()

    def end(self, summary: EncodingSummary) -> bytes:
        """An empty batch with the summary, and the end of the stream."""
        self._write(self._none(), {SUMMARY_KEY: msgspec.json.encode(summary).decode()})
        self._writer.close()
        return self._taken()

    def failed(self, error: ServiceError) -> bytes:
        """An empty batch with the error, and no end of the stream."""
        self._write(self._none(), {ERROR_KEY: msgspec.json.encode(error.error_object()).decode()})
        return self._taken()

    def _none(self) -> RowBlock:
        return RowBlock(0, np.empty((0, 4), np.int64), np.empty((0, self.ahead.dim), np.float32))

    def _write(self, block: RowBlock, metadata: dict[str, str] | None) -> None:
        arrow = self._arrow
        index = np.arange(block.first_row, block.first_row + len(block), dtype=np.int64)
        columns = [index, *np.ascontiguousarray(block.ranges_N4.T)]
        numbers = arrow.array(np.ascontiguousarray(block.vectors_ND, dtype=np.float32).reshape(-1))
        vectors = arrow.FixedSizeListArray.from_arrays(numbers, type=self._schema.field("embedding").type)
        arrays = [arrow.array(column) for column in columns]
        if sections := self.ahead.sections:
            arrays.append(arrow.array(sections_at(sections, block.ranges_N4[:, 2].tolist()), arrow.string()))
        arrays.append(vectors)
        self._writer.write_batch(arrow.RecordBatch.from_arrays(arrays, schema=self._schema), custom_metadata=metadata)

    def _taken(self) -> bytes:
        data = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return data


FORMATS: Mapping[str, type[RowFormat]] = {"ndjson": NdjsonFormat, "arrow": ArrowFormat, "npy": NpyFormat}
_NAMES = {kind.media_type: name for name, kind in FORMATS.items()}


def choose_format(named: str | None, accept: str) -> str:
    """The name of the format; an `Accept` that names none of ours changes nothing."""
    if named is not None:
        return named
    accepted: list[tuple[float, int, str]] = []
    for place, item in enumerate(accept.split(",")):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind in _NAMES and (weight := _weight(parameters)) > 0:
            accepted.append((-weight, place, _NAMES[kind]))
    return min(accepted)[2] if accepted else "ndjson"


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0


def make_format(name: str, ahead: RowsAhead) -> RowFormat:
    """Make the format of one answer.

    Raises: BadRequest for a format that this installation lacks.
    """
    try:
        return FORMATS[name](ahead)
    except MissingExtraError as error:
        raise BadRequest(str(error), code=Code.UNSUPPORTED_PARAMETER, param="format") from None
