"""States that ranks leave, joined by powers of a matrix, or of numbers, that every rank knows.

A message holds the number of tokens in place of the matrix.

Shape letters: B batch, D channels, N numbers of a channel's state, K rows, X numbers of a message.
"""

from dataclasses import dataclass

import torch

from dist_attn.ops.device import without_autocast
from dist_attn.ops.monoid import MONOIDS
from dist_attn.sharded import Sharding
from dist_attn.sharded.prefix_scan import scan_over_ranks

DIGIT = 1 << 20


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


MONOIDS["powers"] = lambda sizes, known: Powers(known[0], sizes[0], bool(sizes[1]))


def scan_powers(
    sharding: Sharding, a: torch.Tensor, own_BDN: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before this rank's first token and after the last global one; `own` is what its tokens leave."""
    layout, comm = sharding.layout, sharding.comm
    monoid = Powers(a, layout.total)
    own = monoid.counted(own_BDN.permute(1, 2, 0), layout.lengths[comm.rank])
    first = None if state is None else monoid.counted(state.to(own_BDN.dtype).permute(1, 2, 0), 0)
    before, after = scan_over_ranks(comm, monoid, own, first, sharding.exchange)
    return monoid.sums(before).permute(2, 0, 1), monoid.sums(after).permute(2, 0, 1)
