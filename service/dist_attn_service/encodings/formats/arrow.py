"""Rows as an Arrow IPC stream; the metadata of its last batch, which has no rows, say whether it is complete."""

import io
from typing import Any, ClassVar, final

import msgspec
import numpy as np

from dist_attn.errors import MissingExtraError, extra_hint
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.encodings.formats.base import RowFormat, RowsAhead
from dist_attn_service.encodings.rows import RowBlock
from dist_attn_service.schemas.completions import EncodingSummary

__all__ = ["ERROR_KEY", "SUMMARY_KEY", "ArrowFormat"]

SUMMARY_KEY, ERROR_KEY = "dist_attn.summary", "dist_attn.error"
RANGES = ("start", "stop", "byte_start", "byte_stop")


@final
class ArrowFormat(RowFormat):
    """Columns index, start, stop, byte_start and byte_stop (int64), embedding (a list of dim float32).

    The schema's metadata say what was asked for. pyarrow is loaded by the first of these.
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
        self._write(self._none(), {SUMMARY_KEY: summary.model_dump_json()})
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
        arrays = [*(arrow.array(column) for column in columns), vectors]
        self._writer.write_batch(arrow.RecordBatch.from_arrays(arrays, schema=self._schema), custom_metadata=metadata)

    def _taken(self) -> bytes:
        data = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return data
