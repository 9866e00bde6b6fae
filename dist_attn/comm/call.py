"""One exchange between ranks: what all of them must agree on, and its result while it is under way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from dist_attn.errors import InputError

__all__ = ["Call", "Pending", "call_of"]


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


def call_of(name: str, x: Tensor, label: str, rows_may_differ: bool = False) -> Call:
    """What the ranks must agree on when they exchange `x`; refuses a tensor whose gradient would be lost."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name} was given a tensor that requires a gradient, which would be lost here: "
            "use dist_attn.comm.differentiable, or pass x.detach()"
        )
    shape = (-1, *x.shape[1:]) if rows_may_differ else tuple(x.shape)
    return Call(name, shape, str(x.dtype).removeprefix("torch."), label)
