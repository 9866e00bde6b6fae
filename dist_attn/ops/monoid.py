"""The associative operation that joins the stretches of two ranks in a scan, on flat messages.

The state of a recurrence after a stretch of tokens is A x + B for the state x before it, so a stretch is the pair
(A, B), and two of them in line are (A2 A1, A2 B1 + B2). A message [..., X] holds B, as K rows of n numbers each, and
behind it A in a form in which zeros mean that nothing changes: a message of zeros is the identity.

    LogDecay      A = diag(exp w), packed as its K log decays w, which add up
    Matrix        A = I + D, packed as the K x K numbers of D

`transposed` is the monoid of the backward pass: with P[0] the identity and P[r + 1] = combine(P[r], x[r]), let g[r] be
the gradient of P[r] that rank r has from its own loss. The one that P[r + 1] gets from all later ranks is

    H.B[r] = g.B[r + 1] + A[r + 1]^T H.B[r + 1],      H.A likewise,

an exclusive scan of `backward_message(x, g)` that is counted from the last rank. `pulled_back` is what follows from it
for x[r] and for what every rank knows: the gradients of combine(P[r], x[r]), of which H is that of the result.

Shape letters: K rows, N columns of B side by side, X numbers of a message, D channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from dist_attn.ops.device import without_autocast


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
        """The name by which `monoid_named` makes this monoid again, together with the `known` tensors."""
        ...

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        """The tensors that every rank knows and no message holds; of their gradients each rank gets its share."""
        ...

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        """The message of both stretches; with zeros on either side the other one, bit for bit."""
        ...

    def transposed(self) -> Self: ...

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The message of a rank to the scan of gradients, from its message `x` and its result's gradient `grad`."""
        ...

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        """The gradient of a message, from the result of the scan of gradients."""
        ...


class Carry(Protocol):
    """A state as exchanges see it: what a stretch of tokens leaves behind, as a message of its monoid."""

    @property
    def monoid(self) -> Monoid: ...

    def pack(self) -> torch.Tensor: ...

    def unpack(self, message: torch.Tensor, /) -> Self:
        """The state in a message of states such as this one."""
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

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        return ()

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        sums = self._sums(later)
        kept = self._decayed(earlier[..., :sums], later)
        return torch.cat([kept + later[..., :sums], earlier[..., sums:] + later[..., sums:]], dim=-1)

    def transposed(self) -> "LogDecay":
        return LogDecay(self.rows, self.added + self.rows)

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad, x[..., -self.rows :]], dim=-1)

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        return later[..., : -self.rows]

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

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        return ()

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        # Both parts obey the same rule: (I + D2) B1 + B2 and (I + D2) (I + D1) - I = (I + D2) D1 + D2.
        earlier_KX, later_KX = self._columns(earlier), self._columns(later)
        d_KK = later_KX[..., -self.rows :]
        with without_autocast(d_KK.device):
            kept_KX = earlier_KX + d_KK @ earlier_KX
        # Where nothing is left it is dropped, not multiplied: rounded or infinite numbers would come through.
        dropped = (d_KK == -torch.eye(self.rows, dtype=d_KK.dtype, device=d_KK.device)).all(-1).all(-1)
        return self._flat(torch.where(dropped[..., None, None], 0.0, kept_KX) + later_KX)

    def transposed(self) -> "Matrix":
        return self

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        d_KK = self._columns(x)[..., -self.rows :]
        return self._flat(torch.cat([self._columns(grad), d_KK.mT], dim=-1))

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        return self._flat(self._columns(later)[..., : -self.rows])

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """B and D side by side, K rows."""
        sums = x.shape[-1] - self.weights
        parts = x[..., :sums], x[..., sums:]
        return torch.cat([part.unflatten(-1, (self.rows, part.shape[-1] // self.rows)) for part in parts], dim=-1)

    def _flat(self, x_KX: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_KX[..., : -self.rows].flatten(-2), x_KX[..., -self.rows :].flatten(-2)], dim=-1)


def pulled_back(
    monoid: Monoid, x: torch.Tensor, before: torch.Tensor, later: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `x` and of what every rank knows, from the results of its scan and of the scan of gradients."""
    again = torch.is_grad_enabled()  # this backward pass is itself to be differentiated
    with torch.enable_grad():
        given = [t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_() for t in (x, *monoid.known)]
        result = monoid_named(monoid.name, given[1:]).combine(before if again else before.detach(), given[0])
        grads: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            result, given, monoid.of_result(later), create_graph=again, materialize_grads=True
        )
    return grads


def monoid_named(name: str, known: Sequence[torch.Tensor] = ()) -> Monoid:
    """The monoid of this name: custom operations of compiled graphs take strings and tensors, not values of our own."""
    kind, *numbers = name.split()
    return MONOIDS[kind](list(map(int, numbers)), known)


MONOIDS: dict[str, Callable[[list[int], Sequence[torch.Tensor]], Monoid]] = {
    "log_decay": lambda sizes, _: LogDecay(*sizes),
    "matrix": lambda sizes, _: Matrix(*sizes),
}
"""The monoids by the first word of their names; packages add their own."""
