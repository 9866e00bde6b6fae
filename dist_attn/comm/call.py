"""One exchange between ranks: what all of them must agree on, and its result while it is under way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

__all__ = ["Call", "Pending"]


@dataclass(frozen=True, slots=True)
class Call:
    """What all ranks of one exchange must agree on; -1 in the shape stands for a size that may differ."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""

    def __str__(self) -> str:
        sizes = ", ".join("any" if size < 0 else str(size) for size in self.shape)
        label = f" for {self.label}" if self.label else ""
        return f"{self.name}({self.dtype}[{sizes}]){label}" if self.dtype else f"{self.name}(){label}"


@final
class Pending:
    """An exchange that is under way; `wait` may be called more than once and gives the same tensor."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once every rank has launched the exchange.

        Raises: CommError if that does not happen within the group's deadline.
        """
        if self._value is None:
            assert self._finish is not None
            self._value = self._finish()
            self._finish = None
        return self._value
