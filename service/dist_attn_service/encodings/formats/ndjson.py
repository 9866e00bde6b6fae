"""Rows as NDJSON: a JSON object per line, then a line with the summary or the error."""

from typing import ClassVar, final

from dist_attn_service.base.errors import ServiceError
from dist_attn_service.encodings.formats.base import RowFormat
from dist_attn_service.encodings.rows import RowBlock, format_rows
from dist_attn_service.schemas.completions import EncodingSummary

__all__ = ["NdjsonFormat"]


@final
class NdjsonFormat(RowFormat):
    """Lines of text."""

    media_type: ClassVar[str] = "application/x-ndjson"
    breaks_off: ClassVar[bool] = False

    def head(self) -> bytes:
        """Nothing."""
        return b""

    def rows(self, block: RowBlock) -> bytes:
        """A line per row."""
        return format_rows(block)

    def end(self, summary: EncodingSummary) -> bytes:
        """The line with the summary."""
        return summary.model_dump_json().encode() + b"\n"

    def failed(self, error: ServiceError) -> bytes:
        """The line with the error."""
        return error.line()
