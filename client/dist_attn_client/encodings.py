"""Rows of documents: which are asked for, how they are read while they come, and from which row to go on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast, final

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn_api.errors import InputError
from dist_attn_api.types import EncodingSummary
from dist_attn_client.errors import BrokenOff, NotOurAnswer, error_of_words
from dist_attn_client.plan import Call, Event, Finished, LineDecoder, Plan, Reached, told
from dist_attn_client.sources import Document, Source

Granularity = Literal["token", "window", "document", "sentence", "paragraph", "chapter"]
Pooling = Literal["mean", "last"]


class RowOptions(TypedDict, total=False):
    """The choice of a document's rows; the model decides about options that are left out, or None."""

    granularity: Granularity | None
    window: int | None
    pooling: Pooling | None
    model: str | None


def check_keywords(method: str, options: Mapping[str, object], known: type) -> None:
    """Refuse a keyword that `method` does not have, as one that lists its parameters would. Raises: TypeError."""
    if unknown := sorted(options.keys() - known.__annotations__.keys()):
        raise TypeError(f"{method}() has no parameter {unknown[0]!r}; it has {', '.join(known.__annotations__)}")


def row_query(options: RowOptions) -> dict[str, str | int | None]:
    """The query of a request for such rows. Raises: TypeError for an option that does not exist."""
    check_keywords("encode", options, RowOptions)
    return dict(cast("Mapping[str, str | int | None]", options))


def what_to_encode(
    document: Document | None, file_id: str | None, boundaries: Sequence[int] | None
) -> tuple[Source | None, dict[str, Any] | None]:
    """The body of a request: the document itself, or JSON for a file of the service or for boundaries.

    Raises: InputError unless there is either a document or a file, for a document that cannot be read, and for
        boundaries of one that is no text.
    """
    if (document is None) == (file_id is None):
        raise InputError("give either a document or the file_id of a file of the service")
    source = None if document is None else Source(document)
    if boundaries is None:
        return source, None if file_id is None else {"file_id": file_id}
    if file_id is None and not isinstance(document, str):
        raise InputError("boundaries go with a str or a file_id; upload a long document and name its file_id")
    return None, told({"input": document, "file_id": file_id}) | {"boundaries": list(boundaries)}


@dataclass(frozen=True, eq=False)
class Row:
    """One row: the tokens and bytes [start, stop) of the document that it stands for, and their vector, float32 [D].

    `section` is the page or heading that it begins in, where the document's kind has any.
    """

    index: int
    start: int
    stop: int
    byte_start: int
    byte_stop: int
    embedding: npt.NDArray[np.float32]
    section: str | None = None


@dataclass(frozen=True)
class EncodingProgress:
    """The progress of an encoding. Units: bytes; `total_bytes` is None where it is not known.

    `sent_bytes` counts from the beginning again when the document has to be sent again; rows never do.
    """

    sent_bytes: int
    total_bytes: int | None
    rows: int
    tokens: int


class _Line(msgspec.Struct):
    """Any line of an answer in NDJSON: a row, unless `object` says otherwise."""

    object: str = ""
    index: int = -1
    start: int = 0
    stop: int = 0
    byte_start: int = 0
    byte_stop: int = 0
    embedding: list[float] = []
    section: str | None = None


@final
class RowsPlan(Plan[Row, EncodingSummary]):
    """Rows as NDJSON, each of them once and in order, of a document or of a job's result.

    `call` makes the request that begins with a given row.
    """

    decoder = LineDecoder

    def __init__(
        self,
        call: Callable[[int], Call],
        *,
        from_row: int = 0,
        on_progress: Callable[[EncodingProgress], None] | None = None,
    ) -> None:
        self._call, self._on_progress = call, on_progress
        self.next_row = from_row
        self._rows = 0
        self._tokens = 0
        self._sent = Reached(0, None)

    def call(self) -> Call:
        """The rows from the next one on."""
        return self._call(self.next_row)

    def begin(self, headers: Mapping[str, str]) -> None:
        """Check that rows come. Raises: NotOurAnswer for something else."""
        kind = headers.get("content-type", "").partition(";")[0]
        if kind != "application/x-ndjson":
            raise NotOurAnswer(f"{self.call().what}: rows were asked for as lines of JSON, and {kind!r} came")

    def take(self, part: bytes | Event) -> Iterator[Row | Finished[EncodingSummary]]:
        """A row, or the last line. Raises: Refused for an error line, BrokenOff for a gap."""
        assert isinstance(part, bytes)
        try:
            line = msgspec.json.decode(part, type=_Line)
            if line.object == "encoding.summary":
                yield Finished(msgspec.json.decode(part, type=EncodingSummary))
                return
            if line.object == "error":
                raise error_of_words(msgspec.json.decode(part, type=dict), what=self.call().what)
        except msgspec.DecodeError as error:
            raise NotOurAnswer(f"{self.call().what}: a line is no row: {error}") from None
        if line.index != self.next_row:
            raise BrokenOff(f"{self.call().what}: row {self.next_row} was due, and row {line.index} came")
        self.next_row += 1
        self._rows, self._tokens = self._rows + 1, line.stop
        self._tell()
        yield Row(
            line.index,
            line.start,
            line.stop,
            line.byte_start,
            line.byte_stop,
            np.asarray(line.embedding, dtype=np.float32),
            line.section,
        )

    def sent(self, reached: Reached) -> None:
        """Take how much of the document has gone out."""
        self._sent = reached
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(EncodingProgress(self._sent.sent, self._sent.total, self._rows, self._tokens))
