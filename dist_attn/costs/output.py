"""How many bytes an encoding's rows take, by format."""

from typing import Literal

__all__ = ["FORMATS", "output_bytes"]

Format = Literal["npy", "ndjson"]
FORMATS: tuple[Format, ...] = ("npy", "ndjson")

NPY_HEADER_BYTES = 128
# A float32 in its fewest digits with its comma, and everything else on a line with its five whole numbers.
TEXT_BYTES_PER_NUMBER = 11.3
TEXT_BYTES_PER_ROW = 110


def output_bytes(rows: int, hidden_size: int, file_format: Format) -> int:
    """The size of `rows` vectors: exact for npy, within a tenth or so for ndjson, whose numbers vary in length."""
    if file_format == "npy":
        return NPY_HEADER_BYTES + 4 * rows * hidden_size
    return round(rows * (TEXT_BYTES_PER_ROW + TEXT_BYTES_PER_NUMBER * hidden_size))
