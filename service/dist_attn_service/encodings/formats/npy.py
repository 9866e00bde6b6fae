"""Rows as a file of NumPy: a header with the number of rows, then their vectors and nothing else."""

import io
from typing import ClassVar, final

import numpy as np

from dist_attn_service.base.errors import EngineFailure, ServiceError
from dist_attn_service.encodings.formats.base import RowFormat, RowsAhead
from dist_attn_service.encodings.rows import RowBlock
from dist_attn_service.schemas.completions import EncodingSummary

__all__ = ["NpyFormat"]


@final
class NpyFormat(RowFormat):
    """Little-endian float32 [rows, dim] in C order, format version 1.0. One that ends early is too short."""

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
        """Their vectors.

        Raises: EngineFailure for more rows than the header has promised.
        """
        self._written += len(block)
        if self._written > self._count:
            raise EngineFailure(f"the engine sent {self._written} rows where {self._count} were due")
        return np.ascontiguousarray(block.vectors_ND, dtype="<f4").tobytes()

    def end(self, summary: EncodingSummary) -> bytes:
        """Nothing.

        Raises: EngineFailure for fewer rows than the header has promised.
        """
        if self._written != self._count:
            raise EngineFailure(f"the engine sent {self._written} rows where {self._count} were due")
        return b""

    def failed(self, error: ServiceError) -> bytes:
        """Nothing: what is there is shorter than its Content-Length."""
        return b""
