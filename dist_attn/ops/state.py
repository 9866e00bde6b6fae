"""The recurrent state of kernel attention: a value with an associative `combine`.

One monoid serves the chunk scan, the scan across ranks, the decode step, sessions and checkpoints
(Random Feature Attention, Eq. 6 and 7; the scan form (a, S) o (a', S') = (a a', a' S + S')).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.monoid import LogDecay

__all__ = ["LinearState", "steps_in_place", "writes_in_place"]

_in_place: ContextVar[bool] = ContextVar("in_place", default=False)


@contextmanager
def steps_in_place() -> Iterator[None]:
    """Let decode steps without gradients write into the states that they are given, which are not used again."""
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def writes_in_place() -> bool:
    """Return whether a step may write into its state now."""
    return not torch.compiler.is_compiling() and _in_place.get() and not torch.is_grad_enabled()


@dataclass(frozen=True)
class LinearState:
    """The sums that a stretch of tokens leaves behind, per batch element and head.

    Shapes:
        s_BHMV        sum of decayed phi(k) v^T.
        z_BHM         sum of decayed phi(k).
        mass_BH       sum of decayed key scales (1 per key when there is none): what `floor` is relative to.
        log_decay_BH  log of the product of the gates; 0 without gates.
        reset_BH      True when a document began inside: whatever came earlier is dropped.

    All tensors are float32 or float64 (reset: bool), whatever the inputs were: a running sum of 65,536
    steps is 92 % wrong in fp16 and 4e-6 wrong in fp32.
    """

    s_BHMV: torch.Tensor
    z_BHM: torch.Tensor
    mass_BH: torch.Tensor
    log_decay_BH: torch.Tensor
    reset_BH: torch.Tensor

    @staticmethod
    def identity(
        batch: int,
        heads: int,
        features: int,
        values: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "LinearState":
        """The state of no tokens: combining with it changes nothing.

        Raises: ShapeError if dtype is not float32 or float64.
        """
        if dtype not in (torch.float32, torch.float64):
            raise ShapeError(f"state dtype {dtype} was asked for; sums over long sequences need float32 or float64")

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return LinearState(
            s_BHMV=zeros(batch, heads, features, values),
            z_BHM=zeros(batch, heads, features),
            mass_BH=zeros(batch, heads),
            log_decay_BH=zeros(batch, heads),
            reset_BH=torch.zeros((batch, heads), dtype=torch.bool, device=device),
        )

    def check(self, *sizes: int) -> None:
        """Raise ShapeError unless this is a state of these sizes, [batch, heads, features, values]."""
        if self.s_BHMV.shape != sizes:
            raise ShapeError(
                f"the state is [batch, heads, features, values] = {tuple(self.s_BHMV.shape)}; these inputs need {sizes}"
            )
        if (self.z_BHM.shape, self.mass_BH.shape) != (sizes[:3], sizes[:2]):
            raise ShapeError(
                f"the state's z and mass are {tuple(self.z_BHM.shape)} and {tuple(self.mass_BH.shape)}; "
                f"these inputs need {sizes[:3]} and {sizes[:2]}"
            )

    def combine(self, later: "LinearState") -> "LinearState":
        """The state of this stretch followed by `later`; associative, with `identity` as its unit."""
        # A document start is a flag, never log a = -inf: inf - inf would be NaN.
        keep_BH = torch.where(later.reset_BH, torch.zeros_like(later.log_decay_BH), later.log_decay_BH.exp())
        return LinearState(
            s_BHMV=keep_BH[..., None, None] * self.s_BHMV + later.s_BHMV,
            z_BHM=keep_BH[..., None] * self.z_BHM + later.z_BHM,
            mass_BH=keep_BH * self.mass_BH + later.mass_BH,
            log_decay_BH=torch.where(later.reset_BH, later.log_decay_BH, self.log_decay_BH + later.log_decay_BH),
            reset_BH=self.reset_BH | later.reset_BH,
        )

    def advance(
        self,
        phi_k_BHM: torch.Tensor,
        v_BHV: torch.Tensor,
        *,
        log_gate_BH: torch.Tensor | None = None,
        key_scale_BH: torch.Tensor | None = None,
        in_place: bool = False,
    ) -> "LinearState":
        """The state one token later (RFA Eq. 6; with gate and key scale 1 - g, Eq. 7).

        With `in_place` s_BHMV, nearly all of it, is written over; the bits are the same.
        """
        dtype = self.s_BHMV.dtype
        phi, v = phi_k_BHM.to(dtype), v_BHV.to(dtype)
        scale_BH: torch.Tensor | float = 1.0
        if key_scale_BH is not None:
            scale_BH = key_scale_BH.to(dtype)
            phi = phi * scale_BH[..., None]
        s, z, mass, log_decay = self.s_BHMV, self.z_BHM, self.mass_BH, self.log_decay_BH
        if log_gate_BH is not None:
            gate_BH = log_gate_BH.to(dtype).exp()
            s = torch.mul(s, gate_BH[..., None, None], out=s if in_place else None)
            z, mass = gate_BH[..., None] * z, gate_BH * mass
            log_decay = log_decay + log_gate_BH.to(dtype)
        # One pass over the state: a step is as slow as its way through memory.
        s = torch.addcmul(s, phi[..., :, None], v[..., None, :], out=s if in_place else None)
        return LinearState(s, z + phi, mass + scale_BH, log_decay, self.reset_BH)

    def read(self, phi_q_BHLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numerator [B, H, L, V] and denominator [B, H, L] of queries that see exactly this state."""
        phi = phi_q_BHLM.to(self.s_BHMV.dtype)
        return phi @ self.s_BHMV, (phi @ self.z_BHM[..., None])[..., 0]

    @property
    def monoid(self) -> LogDecay:
        """The operation that joins messages of states: all sums of a head share one decay."""
        return LogDecay()

    def pack(self) -> torch.Tensor:
        """A message: S, z and the mass, which decay alike, then their log decay; one row per batch and head.

        Shapes: -> [B, H, X], X = M V + M + 2.
        """
        return torch.cat(
            [self.s_BHMV.flatten(2), self.z_BHM, self.mass_BH[..., None], self.log_decay_BH[..., None]], dim=-1
        )

    def unpack(self, message_BHX: torch.Tensor) -> "LinearState":
        """The state in a message, with the sizes and the flags of this one."""
        features, values = self.s_BHMV.shape[2:]
        s_BHN, z_BHM, mass_BH1, log_decay_BH1 = message_BHX.split((features * values, features, 1, 1), dim=-1)
        s_BHMV = s_BHN.unflatten(-1, (features, values))
        return LinearState(s_BHMV, z_BHM, mass_BH1[..., 0], log_decay_BH1[..., 0], self.reset_BH)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields in order, as `LinearState(*tensors)` takes them."""
        return (self.s_BHMV, self.z_BHM, self.mass_BH, self.log_decay_BH, self.reset_BH)

    def detach(self) -> "LinearState":
        """Return the values cut off from the gradient (RFA's stateful segments)."""
        return LinearState(*(t.detach() for t in self.tensors()))

    def to(self, dtype: torch.dtype) -> "LinearState":
        """Return this state in another float dtype."""
        return LinearState(*(t if t is self.reset_BH else t.to(dtype) for t in self.tensors()))

    def select(self, index: slice | list[int] | torch.Tensor) -> "LinearState":
        """The states of some batch elements."""
        return LinearState(*(t[index] for t in self.tensors()))

    @staticmethod
    def stack(states: "list[LinearState]") -> "LinearState":
        """Several states side by side along the batch dimension."""
        return LinearState(*(torch.cat(fields) for fields in zip(*(s.tensors() for s in states), strict=True)))

    @staticmethod
    def fold(states: "list[LinearState]") -> "LinearState":
        """The states combined from first to last, left to right: a fixed order, so a fixed rounding."""
        return reduce(LinearState.combine, states)
