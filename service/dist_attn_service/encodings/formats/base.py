"""What every format of rows has: bytes before, for and behind the rows, and a way to end with an error."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dist_attn_service.base.errors import ServiceError
from dist_attn_service.encodings.rows import RowBlock
from dist_attn_service.schemas.completions import EncodingSummary

__all__ = ["RowFormat", "RowsAhead"]


@dataclass(frozen=True)
class RowsAhead:
    """What is known before the first row: numbers in a row, their count where it is known, and words about them."""

    dim: int
    count: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)


class RowFormat(ABC):
    """Rows of one answer as bytes. Every call may take some milliseconds and is made from one thread at a time."""

    media_type: ClassVar[str]
    needs_count: ClassVar[bool] = False
    """Whether the bytes before the first row hold the number of rows."""
    breaks_off: ClassVar[bool] = True
    """Whether an answer that ends with an error ends without the end of its body, as nothing else would tell."""

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
        """The bytes behind the last row of an answer that is complete."""

    @abstractmethod
    def failed(self, error: ServiceError) -> bytes:
        """The bytes behind the last row of one that is not, in their place."""
