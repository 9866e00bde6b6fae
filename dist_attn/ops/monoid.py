"""The associative operation that joins the stretches of two ranks in a scan, on flat messages.

The state of a recurrence after a stretch of tokens is A x + B for the state x before it, so a stretch is the pair
(A, B), and two of them in line are (A2 A1, A2 B1 + B2). A message [..., X] holds B, as K rows of n numbers each, and
behind it A in a form in which zeros mean that nothing changes: a message of zeros is the identity.

    LogDecay      A = diag(exp w), packed as its K log decays w, which add up
    Matrix        A = I + D, packed as the K x K numbers of D
    Powers        A = a^n of an a that every rank knows: packed as n, the number of tokens
    LegsForgets   A of a LegS memory, packed as its first column without the 1, from which the others follow

`transposed` is the monoid of the backward pass: with P[0] the identity and P[r + 1] = combine(P[r], x[r]), let g[r] be
the gradient of P[r] that rank r has from its own loss. The one that P[r + 1] gets from all later ranks is

    H.B[r] = g.B[r + 1] + A[r + 1]^T H.B[r + 1],      H.A likewise,

an exclusive scan of `backward_message(x, g)` that is counted from the last rank. `pulled_back` is what follows from it
for x[r] and for what every rank knows: the gradients of combine(P[r], x[r]), of which H is that of the result.

Shape letters: K rows, N columns of B side by side, X numbers of a message, D channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from dist_attn.ops.device import without_autocast
from dist_attn.ops.legs import transition_of

DIGIT = 1 << 20


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


@dataclass(frozen=True, eq=False)
class Powers:
    """The tokens of a stretch multiply a state by a^n, and every rank knows a: [B, n as two numbers].

    `a` is [D, K', K'], a matrix for each channel, or complex [D, K'], a number for each row of which the message holds
    the real and the imaginary part. At most `tokens` are counted.
    """

    a: torch.Tensor
    tokens: int
    adjoint: bool = False

    @property
    def rows(self) -> int:
        return self.a[..., 0].numel() if self.a.dim() == 3 else 2 * self.a.numel()

    @property
    def weights(self) -> int:
        return 2

    @property
    def name(self) -> str:
        return f"powers {self.tokens} {int(self.adjoint)}"

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        return (self.a,)

    def counted(self, b_DKN: torch.Tensor, tokens: int) -> torch.Tensor:
        """The message of so many tokens. Shapes: B [D, K', N], complex where a is -> [X]."""
        real = torch.stack([b_DKN.real, b_DKN.imag], dim=2) if b_DKN.is_complex() else b_DKN
        return torch.cat([real.flatten(), self._digits(torch.full((), tokens, device=real.device), real.dtype)])

    def sums(self, message: torch.Tensor) -> torch.Tensor:
        """B of a message, [D, K', N]."""
        columns = (message.shape[0] - 2) // self.rows
        if self.a.dim() == 3:
            return message[:-2].reshape(*self.a.shape[:2], columns)
        return torch.complex(*message[:-2].reshape(*self.a.shape, 2, columns).unbind(2))

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        a, exponent = self.a, self._exponent(later)
        with without_autocast(a.device):
            decay = power_of_count(a, exponent, self.tokens)
            decay = decay.mH if self.adjoint and a.dim() == 3 else decay.conj() if self.adjoint else decay
            b_DKN = self.sums(earlier)
            kept_DKN = decay @ b_DKN if a.dim() == 3 else decay[..., None] * b_DKN
        digits = self._digits(self._exponent(earlier) + exponent, later.dtype)
        kept = self.counted(kept_DKN, 0)[:-2]
        return torch.cat([kept + later[:-2], digits])

    def transposed(self) -> "Powers":
        return Powers(self.a, self.tokens, not self.adjoint)

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad[:-2], x[-2:]])

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        return torch.cat([later[:-2], torch.zeros_like(later[-2:])])

    def _exponent(self, message: torch.Tensor) -> torch.Tensor:
        low, high = message.detach()[-2:].to(torch.int64).unbind()
        return low + high * DIGIT

    def _digits(self, count: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # float32 counts to 2^24 only.
        return torch.stack([count % DIGIT, count // DIGIT]).to(dtype)


@dataclass(frozen=True)
class LegsForgets:
    """Coefficients of a LegS memory: [B as K rows, the first column of A without its 1].

    A depends on the numbers of the tokens alone, so it has no gradient, and all such A commute.
    """

    rows: int
    adjoint: bool = False

    @property
    def weights(self) -> int:
        return self.rows

    @property
    def name(self) -> str:
        return f"legs {self.rows} {int(self.adjoint)}"

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        return ()

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        change_KK = self._change(later[..., -self.rows :].detach())
        b_KN = earlier[..., : -self.rows].unflatten(-1, (self.rows, -1))
        kept_KN = b_KN + (change_KK.mT if self.adjoint else change_KK) @ b_KN
        column_K1 = earlier[..., -self.rows :].detach()[..., None]
        kept = torch.cat([kept_KN.flatten(-2), (column_K1 + change_KK @ column_K1)[..., 0]], dim=-1)
        return kept + later

    def transposed(self) -> "LegsForgets":
        return LegsForgets(self.rows, not self.adjoint)

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad[..., : -self.rows], x[..., -self.rows :].detach()], dim=-1)

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        return torch.cat([later[..., : -self.rows], torch.zeros_like(later[..., -self.rows :])], dim=-1)

    def _change(self, column_RK: torch.Tensor) -> torch.Tensor:
        """A - I; 0 where nothing changes, which rounding would not give."""
        one_K = torch.zeros_like(column_RK)
        one_K[..., 0] = 1.0
        identity_KK = torch.eye(self.rows, dtype=column_RK.dtype, device=column_RK.device)
        changes = (column_RK != 0).any(-1)[..., None, None]
        return torch.where(changes, transition_of(column_RK + one_K) - identity_KK, 0.0)


def power_of_count(a: torch.Tensor, exponent: torch.Tensor, largest: int) -> torch.Tensor:
    """a^exponent by repeated squaring, of matrices [D, K, K] or numbers [D, K]; a tensor says how often.

    In a graph that is being compiled no number of a tensor can be asked for, so that unused squares are made as well;
    they are 1, since the gradient of one that overflows would be NaN.
    """
    one = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand_as(a) if a.dim() == 3 else torch.ones_like(a)
    times = torch.matmul if a.dim() == 3 else torch.mul
    result, square = one, a
    for bit in range(largest.bit_length()):
        result = torch.where((exponent >> bit) % 2 == 1, times(result, square), result)
        square = torch.where(exponent >> (bit + 1) > 0, times(square, square), one)
    return result


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
    sizes = list(map(int, numbers))
    if kind == "powers":
        return Powers(known[0], sizes[0], bool(sizes[1]))
    if kind == "legs":
        return LegsForgets(sizes[0], bool(sizes[1]))
    return LogDecay(*sizes) if kind == "log_decay" else Matrix(*sizes)
