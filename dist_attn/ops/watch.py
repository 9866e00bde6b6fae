"""A watch over the operations inside a `with` block: guarded denominators, numbers that are not finite.

A watch is not passed as an argument: models and operations ask for the one of this thread, which may be none. It
changes no result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import final

import torch

__all__ = ["FiniteCheck", "Watch", "current_watch", "watching"]


@dataclass
class FiniteCheck:
    """Asks `ops.finite` to look at every number; `rank` and `first_tokens` are what it says of where it looks.

    `first_tokens` are the global indices of the first token held here, per row of the batch; the last one holds for all
    further rows.
    """

    rank: int = 0
    first_tokens: tuple[int, ...] = (0,)
    # Is told the operation and what is wrong, in words, in place of an error: ranks that share work go on together.
    tell: Callable[[str, str], None] | None = None

    def first_token(self, row: int) -> int:
        """The global index of this row's first token here."""
        return self.first_tokens[min(row, len(self.first_tokens) - 1)]


@final
class Watch:
    """Counts by layer and head, and where asked for, a look at every number.

    `layer` is the layer that runs, set by the model (0 for a bare operation); `rows`, where set, is how many batch
    elements count: padded ones behind them do not. `counting_B`, where set, says of guarded ones which elements count,
    bool [B]: it may change between replays of a graph, which `rows` cannot. `denominators` are those of all meanwhile.
    """

    def __init__(self, finite: FiniteCheck | None = None) -> None:
        self.finite = finite
        self.layer = 0
        self.rows: int | None = None
        self.counting_B: torch.Tensor | None = None
        self.denominators = 0
        self._guarded: dict[int, torch.Tensor] = {}

    def count(self, guarded: torch.Tensor) -> None:
        """One read-out: whether a policy put something else in the place of a denominator, bool [B, H, ...]."""
        guarded = guarded[: self.rows]
        self.denominators += guarded.numel()
        if self.counting_B is not None:
            guarded = guarded & self.counting_B.view(-1, *[1] * (guarded.dim() - 1))
        guarded_H = guarded.transpose(0, 1).flatten(1).sum(1)
        before = self._guarded.get(self.layer)
        self._guarded[self.layer] = guarded_H if before is None else before + guarded_H

    def add(self, other: "Watch", *, denominators: int | None = None) -> None:
        """Count what another one has counted, of so many denominators where that is known better than by it.

        What it holds may be written over afterwards.
        """
        self.denominators += other.denominators if denominators is None else denominators
        for layer, guarded_H in other._guarded.items():
            before = self._guarded.get(layer)
            self._guarded[layer] = guarded_H.clone() if before is None else before + guarded_H

    @property
    def guarded(self) -> tuple[tuple[int, ...], ...]:
        """Guarded denominators per layer and head; a layer without denominators has no heads."""
        # All at once: on a GPU the host waits whenever it asks.
        numbers = iter(torch.cat(list(self._guarded.values())).tolist() if self._guarded else ())
        told = {n: tuple(islice(numbers, len(guarded_H))) for n, guarded_H in self._guarded.items()}
        return tuple(told.get(n, ()) for n in range(max(told, default=-1) + 1))

    def clear(self) -> None:
        """Begin at nothing."""
        self.denominators = 0
        self._guarded.clear()


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def current_watch() -> Watch | None:
    """The watch of this thread; None when there is none, and always inside a compiled graph."""
    return None if torch.compiler.is_compiling() else _watch.get()


@contextmanager
def watching(watch: Watch | None) -> Iterator[None]:
    """Let the operations inside report to `watch`, or to none."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)
