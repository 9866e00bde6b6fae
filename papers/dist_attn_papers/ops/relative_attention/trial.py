"""The calls of Triton's kernels of relative attention: their kinds, and what a trial of one runs.

Shape letters: B batch, H heads, L tokens, K features, V values, W = V + 1, R rows of relative positions.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from dist_attn.ops.device import send
from dist_attn.ops.fla_known import surroundings_of
from dist_attn.ops.sequence_call import Implementation
from dist_attn.ops.trial import TOKENS, Results, name_of, results_of, way_of
from dist_attn_papers.ops.relative_attention.state import RelativeState, WindowState

if TYPE_CHECKING:
    from dist_attn_papers.ops.relative_attention.call import RelativeCall

__all__ = ["RelativeForm", "RelativeKind", "compared"]

RelativeForm = Literal["causal", "full", "stream"]
NAMES = "q", "k", "v", "rp"
HEADS, BEFORE = 2, 20  # tokens before a stream


@dataclass(frozen=True)
class RelativeKind:
    """Calls for which kernels are compiled once, whatever the number of tokens.

    dtypes      those of queries, keys, values and positions.
    sizes       K, V, R.
    """

    device: torch.device
    form: RelativeForm
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, int, int]
    gradients: bool

    @staticmethod
    def of(call: "RelativeCall", form: RelativeForm) -> "RelativeKind":
        """The kind of a call; with gradients where autograd is on, as kinds of linear attention."""
        _, k, v, rp = call.tensors
        sizes, dtypes = (k.shape[3], v.shape[3], rp.shape[1]), tuple(t.dtype for t in call.tensors)
        return RelativeKind(v.device, form, dtypes, sizes, torch.is_grad_enabled())

    @property
    def words(self) -> str:
        """The kind as people are told of it."""
        types = "/".join(dict.fromkeys(map(name_of, self.dtypes)))
        what = f"{self.form} {types} {way_of(self.gradients)}, {' x '.join(map(str, self.sizes))}"
        return f"Triton's relative {what} (Triton {surroundings_of(self.device).triton})"


def compared(kind: RelativeKind) -> tuple[Results, Results]:
    """The results of the kernels, and of the windowed form in float32, on random numbers: features are positive."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return send(torch.randn(shape, generator=generator, device="cpu"), kind.device)

    size, values, rows = kind.sizes
    reach = rows // 2
    tokens = (1, HEADS, TOKENS + reach)  # some are older than a window
    numbers = normal(*tokens, size).abs(), normal(*tokens, size).abs(), normal(*tokens, values)
    positions = normal(HEADS, rows, size).abs()
    given = {name: t.to(dtype) for name, t, dtype in zip(NAMES, (*numbers, positions), kind.dtypes, strict=True)}
    if kind.form == "stream":
        v1 = torch.cat([normal(1, HEADS, BEFORE, values), torch.ones(1, HEADS, BEFORE, 1, device=kind.device)], dim=3)
        state = RelativeState.of(normal(1, HEADS, BEFORE, size).abs(), v1, max(reach - 1, 0))
        far, near = state.window.far_BHW, state.window.near_BHTW
        given |= {"sz": state.sz_BHMW, "far": far[..., :-1], "near": near[..., :-1]}
    by_kernels = results_of(partial(_run, kind, "triton"), given, gradients=kind.gradients)
    exact = results_of(partial(_run, kind, "streaming"), given, gradients=kind.gradients, dtype=torch.float32)
    return by_kernels, exact


def _run(kind: RelativeKind, implementation: Implementation, given: Results) -> Results:
    # These choose, and so need what is here.
    from dist_attn_papers.ops.relative_attention import RelativeCall, attend_relative, stream_relative

    call = RelativeCall(given["q"], given["k"], given["v"], given["rp"], kind.form != "full")
    if kind.form != "stream":
        return {"outputs": attend_relative(replace(call, implementation=implementation))}
    # The ones that count a window's keys have no gradients by kernels.
    width, far = given["near"].shape[2], given["far"]
    ones = send((torch.arange(width, device="cpu") >= width - BEFORE).float(), far.device).expand(1, HEADS, width)
    near = torch.cat([given["near"], ones[..., None]], dim=3)
    window = WindowState(F.pad(far, (0, 1), value=max(0.0, BEFORE - width)), near, BEFORE)
    state = RelativeState(given["sz"], window)
    out, after = stream_relative(replace(call, state=state, implementation=implementation))
    return {"outputs": out, "sums": after.sz_BHMW, "far": after.window.far_BHW, "near": after.window.near_BHTW}
