"""How the stretches of two ranks join: the associative operation of a scan, on flat messages.

The state of a recurrence after a stretch of tokens is A x + B for the state x before it, so a stretch is the pair
(A, B), and two of them in line are (A2 A1, A2 B1 + B2). A message [..., X] holds B, as K rows of n numbers each, and
behind it A in a form in which zeros mean that nothing changes: a message of zeros is the identity.

    LogDecay   A = diag(exp w), packed as its K log decays w, which add up
    Matrix     A = I + D, packed as the K x K numbers of D

`transposed` is the monoid of the backward pass: with P[0] the identity and P[r + 1] = combine(P[r], x[r]), let g[r] be
the gradient of P[r] that rank r has from its own loss. The one that P[r + 1] gets from all later ranks is

    H.B[r] = g.B[r + 1] + A[r + 1]^T H.B[r + 1],      H.A likewise,

an exclusive scan of `backward_message(x, g)` that is counted from the last rank, and `gradient` is what follows from it
for x[r].
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F

__all__ = ["LogDecay", "Matrix", "Monoid", "join_pieces", "monoid_named", "split_pieces"]


class Monoid(Protocol):
    """An associative operation on messages, with zeros as its identity, and what its backward pass needs.

    `rows` is K, the rows of B; `weights` the numbers behind B, which a message that is cut in pieces has in each.
    """

    @property
    def rows(self) -> int: ...

    @property
    def weights(self) -> int: ...

    @property
    def name(self) -> str:
        """What `monoid_named` makes the same monoid of."""
        ...

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The message of both stretches; with zeros on either side the other one, bit for bit."""
        ...

    def transposed(self) -> Self: ...

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What a rank with the message `x` and the gradient `grad` of its result brings to the scan of gradients."""
        ...

    def gradient(self, x: torch.Tensor, before: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The gradient of `x`, from the result `before` of its scan and the result `later` of the scan of gradients."""
        ...


@dataclass(frozen=True)
class LogDecay:
    """Rows that decay by numbers of their own: [B as K rows, `added` numbers that only add up, w].

    Kernel attention has K = 1, as all sums of a head share one decay; a gate for each key channel has K = key size.
    """

    rows: int = 1
    added: int = 0

    @property
    def weights(self) -> int:
        return self.rows + self.added

    @property
    def name(self) -> str:
        return f"log_decay {self.rows} {self.added}"

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        sums = self._sums(later)
        kept = self._decayed(earlier[..., :sums], later)
        return torch.cat([kept + later[..., :sums], earlier[..., sums:] + later[..., sums:]], dim=-1)

    def transposed(self) -> "LogDecay":
        return LogDecay(self.rows, self.added + self.rows)

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad, x[..., -self.rows :]], dim=-1)

    def gradient(self, x: torch.Tensor, before: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        sums = self._sums(x)
        later_sums, added, of_decay, _ = later.split((sums, self.added, self.rows, self.rows), dim=-1)
        kept = self._decayed(before[..., :sums], x)
        of_decay = of_decay + (later_sums * kept).unflatten(-1, (self.rows, -1)).sum(-1)
        return torch.cat([later_sums, added, of_decay], dim=-1)

    def _sums(self, x: torch.Tensor) -> int:
        return x.shape[-1] - self.weights

    def _decayed(self, sums: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """A B for the A of the message `by`."""
        decay: torch.Tensor = by[..., -self.rows :].exp()
        if self.rows == 1:
            return sums * decay
        sums_KN: torch.Tensor = sums.unflatten(-1, (self.rows, -1))
        return (sums_KN * decay[..., None]).flatten(-2)


@dataclass(frozen=True)
class Matrix:
    """Rows that a matrix mixes: [B, D], each row-major, with A = I + D."""

    rows: int

    @property
    def weights(self) -> int:
        return self.rows**2

    @property
    def name(self) -> str:
        return f"matrix {self.rows}"

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        # Both parts obey the same rule: (I + D2) B1 + B2 and (I + D2) (I + D1) - I = (I + D2) D1 + D2.
        earlier_KX, later_KX = self._columns(earlier), self._columns(later)
        return self._flat(earlier_KX + later_KX[..., -self.rows :] @ earlier_KX + later_KX)

    def transposed(self) -> "Matrix":
        return self

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        d_KK = self._columns(x)[..., -self.rows :]
        return self._flat(torch.cat([self._columns(grad), d_KK.mT], dim=-1))

    def gradient(self, x: torch.Tensor, before: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        later_KX = self._columns(later)[..., : -self.rows]
        of_d_KK = later_KX @ self._columns(before).mT
        return self._flat(torch.cat([later_KX[..., : -self.rows], later_KX[..., -self.rows :] + of_d_KK], dim=-1))

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """B and D side by side, K rows."""
        sums = x.shape[-1] - self.weights
        parts = x[..., :sums], x[..., sums:]
        return torch.cat([part.unflatten(-1, (self.rows, part.shape[-1] // self.rows)) for part in parts], dim=-1)

    def _flat(self, x_KX: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_KX[..., : -self.rows].flatten(-2), x_KX[..., -self.rows :].flatten(-2)], dim=-1)


def monoid_named(name: str) -> LogDecay | Matrix:
    """The monoid of this name: custom operations of compiled graphs take strings, not values of our own."""
    kind, *numbers = name.split()
    sizes = map(int, numbers)
    return LogDecay(*sizes) if kind == "log_decay" else Matrix(*sizes)


def split_pieces(monoid: Monoid, message: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    """Messages of equal size, each with some columns of B and all of A, that can be combined by themselves.

    Shapes: [..., K n + W] -> `pieces` times [..., K ceil(n / pieces) + W]; zeros fill the last one.
    """
    columns_KN = message[..., : -monoid.weights].unflatten(-1, (monoid.rows, -1))
    weights = message[..., -monoid.weights :]
    width = -(-columns_KN.shape[-1] // pieces)
    padded_KN = F.pad(columns_KN, (0, pieces * width - columns_KN.shape[-1]))
    return tuple(torch.cat([part.flatten(-2), weights], dim=-1) for part in padded_KN.split(width, dim=-1))


def join_pieces(monoid: Monoid, pieces: "tuple[torch.Tensor, ...] | list[torch.Tensor]", columns: int) -> torch.Tensor:
    """The message of `columns` numbers that was split into these."""
    parts_KN = [piece[..., : -monoid.weights].unflatten(-1, (monoid.rows, -1)) for piece in pieces]
    sums_KN = torch.cat(parts_KN, dim=-1)[..., : (columns - monoid.weights) // monoid.rows]
    return torch.cat([sums_KN.flatten(-2), pieces[0][..., -monoid.weights :]], dim=-1)
