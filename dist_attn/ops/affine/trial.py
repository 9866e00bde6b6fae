"""The calls of flash-linear-attention's kernels of affine recurrences: their kinds, and what a trial of one runs.

It first runs the kernels on the call itself, where there is memory for it: that is when Triton measures tiles for its
sizes.

Shape letters: B batch, H heads, L tokens, K key size, V values.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dist_attn.ops.affine.call import AffineCall, Inputs
from dist_attn.ops.affine.state import AffineState
from dist_attn.ops.affine.streaming import stream_recurrence
from dist_attn.ops.device import send
from dist_attn.ops.fla_known import surroundings_of
from dist_attn.ops.gpu_record import FlaOperation
from dist_attn.ops.trial import CLOSED, STARTS, TOKENS, Results, name_of, results_of, way_of

__all__ = ["AffineKind", "compared"]

Form = Callable[[AffineCall], tuple[torch.Tensor, AffineState]]


@dataclass(frozen=True)
class AffineKind:
    """Calls for which kernels are compiled and their tiles measured once, whatever the number of tokens.

    sizes       B as 1 or more, H, K, V.
    packed      several documents.
    """

    device: torch.device
    operation: FlaOperation
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]
    packed: bool
    gradients: bool

    @property
    def words(self) -> str:
        """The kind as people are told of it."""
        on, (_, heads, size, values) = surroundings_of(self.device), self.sizes
        what = f"{self.operation} {name_of(self.dtype)} {way_of(self.gradients)}, {heads} x {size} x {values}"
        whose = f"(fla {on.fla}, Triton {on.triton})"
        return f"flash-linear-attention's {what}{', packed' * self.packed} {whose}"

    def call(self) -> AffineCall:
        """A call of this kind, of the same random numbers each time."""
        generator = torch.Generator(device="cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return send(torch.randn(shape, generator=generator, device="cpu"), self.device)

        batch, heads, size, values = self.sizes
        per_token, kind = (batch, heads, TOKENS), self.operation
        vector = kind not in ("fla_simple_gla", "fla_gated_delta")
        decay = F.logsigmoid(3 + normal(*per_token, size if vector else 1))
        decay[:, :, CLOSED] = -torch.inf
        q, k, b = (F.normalize(normal(*per_token, size), dim=-1).to(self.dtype) for _ in range(3))
        beta = normal(*per_token).sigmoid()
        return AffineCall(
            q,
            k,
            normal(*per_token, values).to(self.dtype),
            decay,
            (-b * beta[..., None].to(self.dtype), b) if kind == "fla_dplr" else None,
            beta if kind in ("fla_gated_delta", "fla_kda") else None,
            normal(heads, size) if kind == "fla_rwkv6" else None,
            "before" if kind == "fla_rwkv6" else "after",
            AffineState(normal(batch, heads, size, values)),
            documents=STARTS if self.packed else (),
        )


def compared(call: AffineCall, kind: AffineKind) -> tuple[Results, Results]:
    """Measure tiles on the call; the results of the kernels, and of the streaming form, on a small one of its kind."""
    from dist_attn.ops.affine.fla import fla_recurrence  # a machine without a GPU need not have fla

    small = kind.call()
    if call.tokens >= TOKENS:
        with suppress(torch.cuda.OutOfMemoryError):  # beside a step
            _results(call, fla_recurrence, kind)
    return _results(small, fla_recurrence, kind), _results(small, stream_recurrence, kind, torch.float32)


def _results(call: AffineCall, form: Form, kind: AffineKind, dtype: torch.dtype | None = None) -> Results:
    given = call.inputs(None if call.state is None else call.state.s_BHKV)
    there = {name: t for name, t in zip(Inputs._fields, given, strict=True) if t is not None}

    def run(leaves: Results) -> Results:
        inputs = Inputs(*map(leaves.get, Inputs._fields))
        out, after = form(replace(AffineCall.of(inputs, call.read, call.documents), products=kind.dtype))
        return {"outputs": out, "state": after.s_BHKV}

    return results_of(run, there, gradients=kind.gradients, dtype=dtype, squares=True)
