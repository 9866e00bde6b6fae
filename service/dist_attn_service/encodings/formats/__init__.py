"""The formats that rows are sent in, chosen by name or by what a client accepts."""

from dist_attn_service.encodings.formats.base import RowFormat, RowsAhead
from dist_attn_service.encodings.formats.choice import FORMATS, choose_format, make_format

__all__ = ["FORMATS", "RowFormat", "RowsAhead", "choose_format", "make_format"]
