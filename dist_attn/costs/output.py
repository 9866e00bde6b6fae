"""How many bytes an encoding's rows take, by format."""

from typing import Literal

OutputFormat = Literal["npy", "ndjson", "arrow"]
FORMATS: tuple[OutputFormat, ...] = ("npy", "ndjson")  # of files

NPY_HEADER_BYTES = 128
# A float32 in its fewest digits with its comma, and everything else on a line with its five whole numbers.
TEXT_BYTES_PER_NUMBER = 11.3
TEXT_BYTES_PER_ROW = 110
# Five whole numbers beside the vector, and what stands around a batch of rows.
ARROW_BYTES_PER_ROW, ARROW_BYTES_PER_BATCH, ARROW_BATCH_FLOATS = 40, 400, 1 << 15


def output_bytes(rows: int, hidden_size: int, file_format: OutputFormat) -> int:
    """The size of `rows` vectors: exact for npy, within a percent for arrow in more than a few rows, within a tenth or
    so for ndjson, whose numbers vary in length.
    """
    if file_format == "npy":
        return NPY_HEADER_BYTES + 4 * rows * hidden_size
    if file_format == "arrow":
        batches = 3 + -(-rows * hidden_size // ARROW_BATCH_FLOATS)  # with the schema and the summary
        return rows * (ARROW_BYTES_PER_ROW + 4 * hidden_size) + batches * ARROW_BYTES_PER_BATCH
    return round(rows * (TEXT_BYTES_PER_ROW + TEXT_BYTES_PER_NUMBER * hidden_size))
