"""Launches of the forward kernels on one stretch of tokens: gates, sums of chunks, their scan, outputs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpretedFunction

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap, FusedForm, HasFusedForm
from dist_attn.ops.linear_attention.block import CLOSED
from dist_attn.ops.linear_attention.triton_outputs import outputs_kernel
from dist_attn.ops.linear_attention.triton_states import chunk_sums_kernel, gates_kernel, scan_kernel
from dist_attn.ops.linear_attention.triton_sums import sequence_sums_kernel
from dist_attn.ops.linear_attention.triton_tiles import Tiles

__all__ = [
    "INTERPRETED",
    "Gates",
    "Plan",
    "States",
    "Stretch",
    "chunk_sums",
    "either",
    "gates",
    "make_plan",
    "on_device",
    "options",
    "outputs",
    "precision",
    "scan",
    "sequence_sums",
    "states",
    "tile_dtype",
]

# Triton decides when the kernels are imported, by TRITON_INTERPRET: the same kernels in numpy, on tensors of the CPU.
INTERPRETED = isinstance(outputs_kernel, InterpretedFunction)
SCAN_BLOCK = 1024
SUM_PROGRAMS = 2048  # several for each of the 132 units of an H200
CLOSED_GATE = CLOSED[torch.float32]


@dataclass(frozen=True)
class Plan:
    """What is the same for all stretches of a call."""

    map: str
    unit_norm: bool
    policy: Denominator
    tiles: Tiles
    projections: int  # D
    features: int  # M

    @property
    def scale(self) -> float:
        """What features are multiplied by."""
        return float(self.projections**-0.5)

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """What the kernels that make features are compiled for."""
        return {
            "MAP": self.map,
            "UNIT": self.unit_norm,
            "PRECISION": precision(dtype),
            "T": self.tiles.chunk,
            "BLOCK_D": self.tiles.block_d,
            "BLOCK_K": self.tiles.block_k,
            "BLOCK_V": self.tiles.block_v,
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
        }

    def blocks(self, size: int, block: int) -> int:
        return -(-size // block)


def make_plan(size: int, values: int, feature_map: FeatureMap | None, policy: Denominator, tiles: Tiles) -> Plan:
    """How a map of this form and these sizes is computed."""
    form: FusedForm | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    if feature_map is not None:
        assert isinstance(feature_map, HasFusedForm)  # `choose` lets no other come here
        form, tensors = feature_map.fused_form(), feature_map.tensors()
    projections = tensors[0].shape[1] if tensors else size
    return Plan(
        map="none" if form is None else form.kind,
        unit_norm=form is not None and form.unit_norm,
        policy=policy,
        tiles=tiles.fitted(size, projections, values),
        projections=projections,
        features=2 * projections if form is not None and form.kind == "gaussian" else projections,
    )


class Stretch(NamedTuple):
    """The tokens of one set of launches.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], last dimension contiguous; w [H, D, K] float32; log_gate, key_scale
        [B, H, L] contiguous; documents int32 [N T], how many documents have started in this stretch so far.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    log_gate: torch.Tensor | None
    key_scale: torch.Tensor | None
    documents: torch.Tensor | None

    def chunks(self, plan: Plan) -> int:
        return plan.blocks(self.v.shape[2], plan.tiles.chunk)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory for G = B H groups, on the device of the tokens."""
        return torch.empty((self.v.shape[0] * self.v.shape[1], *shape), dtype=dtype, device=self.v.device)


class Gates(NamedTuple):
    """Of every token [G, N T] and of every chunk [G, N]; see `gates_kernel`. The key scale is filled up with zeros."""

    decay: torch.Tensor
    left: torch.Tensor
    read: torch.Tensor
    gain: torch.Tensor
    key_scale: torch.Tensor | None

    @property
    def kept(self) -> torch.Tensor:
        """What enters the state after the chunk."""
        return self.left if self.key_scale is None else self.left * self.key_scale


class States(NamedTuple):
    """The state before each chunk, [G, N, M, V] as it enters products and [G, N, M + 1], and the one after the last."""

    before: torch.Tensor
    zm_before: torch.Tensor
    end: torch.Tensor
    zm_end: torch.Tensor


def precision(dtype: torch.dtype) -> str:
    """How tiles enter matrix units; see `triton_features`."""
    if dtype == torch.bfloat16:
        return "bf16_interpreted" if INTERPRETED else "bf16"
    return "tf32" if dtype == torch.float16 else "ieee"


def gates(plan: Plan, stretch: Stretch) -> Gates:
    tokens, chunks = stretch.v.shape[2], stretch.chunks(plan)
    decay, left, read = (stretch.empty(chunks * plan.tiles.chunk) for _ in range(3))
    gain = stretch.empty(chunks)
    gates_kernel[(gain.numel(),)](
        either(stretch.log_gate, left), either(stretch.documents, left), decay, left, read, gain, tokens, chunks,
        HAS_GATE=stretch.log_gate is not None, HAS_DOCUMENTS=stretch.documents is not None,
        CLOSED=CLOSED_GATE, T=plan.tiles.chunk, num_warps=8,
    )  # fmt: skip
    key_scale = stretch.key_scale
    if key_scale is not None:
        key_scale = F.pad(key_scale.flatten(0, 1).float(), (0, left.shape[1] - tokens))
    return Gates(decay, left, read, gain, key_scale)


def chunk_sums(
    plan: Plan,
    stretch: Stretch,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[G, N, M, V] and [G, N, M + 1]; weights [G, N T] are those of y, of features and of masses.

    Where types differ, as relative attention lets them, the precision is that of y, as everywhere in its kernels.
    """
    heads, size, values = x.shape[1], x.shape[3], y.shape[3]
    chunks = stretch.chunks(plan)
    sums = stretch.empty(chunks, plan.features, values)
    zm = stretch.empty(chunks, plan.features + 1)
    grid = (
        chunks * sums.shape[0],
        plan.blocks(values, plan.tiles.block_v),
        plan.blocks(plan.projections, plan.tiles.block_d),
    )
    chunk_sums_kernel[grid](
        x, y, stretch.w, *weights, sums, zm, *x.stride()[:3], *y.stride()[:3],
        x.shape[2], chunks, heads, size, plan.projections, plan.features, values, plan.scale,
        **plan.constants(y.dtype),
    )  # fmt: skip
    return sums, zm


def sequence_sums(
    plan: Plan,
    stretch: Stretch,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_sums` of all chunks together, [G, M, V] and [G, M + 1]."""
    heads, size, values = x.shape[1], x.shape[3], y.shape[3]
    chunks = stretch.chunks(plan)
    groups = x.shape[0] * heads
    blocks = plan.blocks(values, plan.tiles.block_v), plan.blocks(plan.projections, plan.tiles.block_d)
    # Enough programs to fill a GPU, and no more: each leaves sums of its own behind.
    length = max(1, chunks * groups * blocks[0] * blocks[1] // SUM_PROGRAMS)
    splits = plan.blocks(chunks, length)
    sums, zm = stretch.empty(splits, plan.features, values), stretch.empty(splits, plan.features + 1)
    sequence_sums_kernel[(groups * splits, *blocks)](
        x, y, stretch.w, *weights, sums, zm, *x.stride()[:3], *y.stride()[:3],
        x.shape[2], chunks, heads, size, plan.projections, plan.features, values, plan.scale, splits, length,
        **plan.constants(x.dtype),
    )  # fmt: skip
    return sums.sum(1), zm.sum(1)


def scan(
    sums: torch.Tensor,
    start: torch.Tensor,
    gain: torch.Tensor,
    *,
    dtype: torch.dtype,
    reverse: bool = False,
    other: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The state before each chunk in `dtype`, the last one, and [G, N] products with `other`; see `scan_kernel`."""
    groups, chunks = gain.shape
    elements = start.numel() // groups
    before = sums if dtype == sums.dtype else torch.empty_like(sums, dtype=dtype)
    end = torch.empty_like(start)
    blocks = -(-elements // SCAN_BLOCK)
    dots = None if other is None else gain.new_empty((groups, chunks, blocks))
    scan_kernel[(groups, blocks)](
        sums, start, before, end, gain, either(other, sums), either(dots, sums), chunks, elements,
        REVERSE=reverse, WITH_DOT=other is not None, BLOCK=SCAN_BLOCK, num_warps=4,
    )  # fmt: skip
    return before, end, None if dots is None else dots.sum(-1)


def states(plan: Plan, stretch: Stretch, gate: Gates, s: torch.Tensor, zm: torch.Tensor) -> States:
    """From the state s [G, M, V], zm [G, M + 1] before the stretch."""
    kept = gate.kept
    sums, zm_sums = chunk_sums(plan, stretch, stretch.k, stretch.v, (kept, kept, kept))
    before, end, _ = scan(sums, s, gate.gain, dtype=tile_dtype(stretch.v.dtype))
    zm_before, zm_end, _ = scan(zm_sums, zm, gate.gain, dtype=torch.float32)
    return States(before, zm_before, end, zm_end)


def outputs(
    plan: Plan, stretch: Stretch, gate: Gates, state: States, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill `out` [B, H, L, V]; denominators before any policy and masses [G, L]."""
    q, k, v = stretch.q, stretch.k, stretch.v
    tokens, values, chunks = v.shape[2], v.shape[3], stretch.chunks(plan)
    den, mass = stretch.empty(tokens), stretch.empty(tokens)
    outputs_kernel[(chunks * den.shape[0], plan.blocks(values, plan.tiles.block_v))](
        q, k, v, stretch.w, gate.decay, either(gate.key_scale, den), gate.read, either(stretch.documents, den),
        state.before, state.zm_before, out, den, mass,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        tokens, chunks, v.shape[1], q.shape[3], plan.projections, plan.features, values, plan.scale, plan.policy.eps,
        KIND=plan.policy.kind, **options(stretch), **plan.constants(q.dtype),
    )  # fmt: skip
    return den, mass


def options(stretch: Stretch) -> dict[str, bool]:
    """Which optional inputs there are."""
    return {
        "HAS_GATE": stretch.log_gate is not None,
        "HAS_SCALE": stretch.key_scale is not None,
        "HAS_DOCUMENTS": stretch.documents is not None,
    }


def tile_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states are kept as where they only enter products: sums themselves are always float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels go to the current GPU, so this must be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def either(given: torch.Tensor | None, filler: torch.Tensor) -> torch.Tensor:
    """What a kernel is given in the place of an input that is not there: it never looks at it."""
    return filler if given is None else given
