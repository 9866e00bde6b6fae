"""The state of an affine recurrence: what a stretch of tokens leaves behind, and what it does to a state before it.

A stretch is the pair (A, B): the state S before it becomes A S + B. A is the identity, a number for each head, a
diagonal or a matrix. Two stretches in line are (A2 A1, A2 B1 + B2), so states join associatively.
"""

from dataclasses import dataclass

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.monoid import LogDecay, Matrix, Monoid

__all__ = ["AffineState"]


@dataclass(frozen=True)
class AffineState:
    """B, and A in one of two forms; a state to go on from has none, since nothing before it counts.

    Shapes:
        s_BHKV          B, the state after the stretch where it began from zeros.
        log_decay_BHK   [B, H, 1] or [B, H, K]: A is diagonal with exp of it; -inf where nothing is left.
        change_BHKK     A = I + change.

    Floats are float32 or float64, whatever the inputs were. Log decays are added, never multiplied; the product of
    matrices may underflow to 0, which is right.
    """

    s_BHKV: torch.Tensor
    log_decay_BHK: torch.Tensor | None = None
    change_BHKK: torch.Tensor | None = None

    @staticmethod
    def from_sums(s_BHKV: torch.Tensor) -> "AffineState":
        """A state to go on from.

        Raises: ShapeError unless it is [B, H, K, V] in float32 or float64.
        """
        if s_BHKV.dim() != 4 or s_BHKV.dtype not in (torch.float32, torch.float64):
            raise ShapeError(
                f"the state is {s_BHKV.dtype} {tuple(s_BHKV.shape)}; needed is [batch, heads, key size, values] in "
                "float32 or float64"
            )
        return AffineState(s_BHKV)

    @property
    def transition(self) -> torch.Tensor | None:
        """A: numbers [B, H], diagonals [B, H, K] or matrices [B, H, K, K]; None of a state to go on from."""
        if self.change_BHKK is not None:
            size = self.change_BHKK.shape[-1]
            return self.change_BHKK + torch.eye(size, dtype=self.change_BHKK.dtype, device=self.change_BHKK.device)
        if self.log_decay_BHK is None:
            return None
        decay_BHK = self.log_decay_BHK.exp()
        return decay_BHK[..., 0] if decay_BHK.shape[-1] == 1 else decay_BHK

    @property
    def monoid(self) -> Monoid:
        """The operation that joins stretches with such an A.

        Raises: ShapeError for a state to go on from, which has none.
        """
        if self.change_BHKK is not None:
            return Matrix(self.change_BHKK.shape[-1])
        if self.log_decay_BHK is not None:
            return LogDecay(self.log_decay_BHK.shape[-1])
        raise ShapeError("a state to go on from was given where a stretch of tokens is needed: it has no transition")

    def pack(self) -> torch.Tensor:
        """B and A as one message, [B, H, X]."""
        weights = self.log_decay_BHK if self.change_BHKK is None else self.change_BHKK.flatten(2)
        return torch.cat([self.s_BHKV.flatten(2)] + ([] if weights is None else [weights]), dim=-1)

    def unpack(self, message_BHX: torch.Tensor) -> "AffineState":
        """The state in a message of states such as this one."""
        sums, weights = message_BHX.split(self._split(message_BHX), dim=-1)
        s_BHKV = sums.unflatten(-1, self.s_BHKV.shape[2:])
        if self.change_BHKK is not None:
            return AffineState(s_BHKV, change_BHKK=weights.unflatten(-1, self.change_BHKK.shape[2:]))
        return AffineState(s_BHKV, None if self.log_decay_BHK is None else weights)

    def begun(self, state: "AffineState") -> "AffineState":
        """`state` as a stretch with an A such as this one's, the identity: what lies before the first token."""
        log_decay, change = (None if t is None else torch.zeros_like(t) for t in (self.log_decay_BHK, self.change_BHKK))
        return AffineState(state.s_BHKV.to(self.s_BHKV.dtype), log_decay, change)

    def combine(self, later: "AffineState") -> "AffineState":
        """This stretch, or this state to go on from, followed by the stretch `later`.

        Raises: ShapeError for states that do not fit together, or where `later` is a state to go on from.
        """
        monoid = later.monoid
        if self.s_BHKV.shape != later.s_BHKV.shape:
            raise ShapeError(f"states {tuple(self.s_BHKV.shape)} and {tuple(later.s_BHKV.shape)} do not fit together")
        if self.transition is None:
            return AffineState(later.unpack(monoid.combine(later.begun(self).pack(), later.pack())).s_BHKV)
        if type(self.monoid) is not type(monoid) or self.pack().shape != later.pack().shape:
            raise ShapeError(f"stretches of kinds {self.monoid.name!r} and {monoid.name!r} do not fit together")
        return later.unpack(monoid.combine(self.pack(), later.pack()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are there, B first."""
        return tuple(t for t in (self.s_BHKV, self.log_decay_BHK, self.change_BHKK) if t is not None)

    def detach(self) -> "AffineState":
        """Return the values cut off from the gradient."""
        log_decay, change = (None if t is None else t.detach() for t in (self.log_decay_BHK, self.change_BHKK))
        return AffineState(self.s_BHKV.detach(), log_decay, change)

    def _split(self, message_BHX: torch.Tensor) -> list[int]:
        sums = self.s_BHKV[0, 0].numel() if self.s_BHKV.numel() else self.s_BHKV.shape[2] * self.s_BHKV.shape[3]
        return [sums, message_BHX.shape[-1] - sums]
