"""Launches of the forward kernels on one stretch of tokens: gates, sums of chunks, their scan, outputs.

Shape letters: B batch, H heads, L tokens, K head size, V values, D projections, M features; G = B H, N chunks of T
tokens.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpretedFunction

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap, FusedForm, HasFusedForm
from dist_attn.ops.linear_attention.block import CLOSED
from dist_attn.ops.linear_attention.triton_outputs import outputs_kernel, read_kernel
from dist_attn.ops.linear_attention.triton_states import gates_kernel, scan_kernel, sums_kernel
from dist_attn.ops.linear_attention.triton_tiles import Tiles, power_tile

# Triton decides when the kernels are imported, by TRITON_INTERPRET: the same kernels in numpy, on tensors of the CPU.
INTERPRETED = isinstance(outputs_kernel, InterpretedFunction)
SCAN_BLOCK = 1024
SUM_PROGRAMS = 264  # of four warps: as many as lie beside each other on the 132 units of an H100
CLOSED_GATE = CLOSED[torch.float32]


@dataclass(frozen=True)
class KernelPlan:
    """The settings that all stretches of a call share."""

    map: str
    unit_norm: bool
    policy: Denominator
    tiles: Tiles
    head_size: int  # K
    projections: int  # D
    features: int  # M

    @staticmethod
    def of(size: int, values: int, feature_map: FeatureMap | None, policy: Denominator, tiles: Tiles) -> "KernelPlan":
        """Plan the computation of a map of this form and these sizes."""
        form: FusedForm | None = None
        tensors: tuple[torch.Tensor, ...] = ()
        if feature_map is not None:
            assert isinstance(feature_map, HasFusedForm)  # `choose` lets no other come here
            form, tensors = feature_map.fused_form(), feature_map.tensors()
        projections = tensors[0].shape[1] if tensors else size
        return KernelPlan(
            map="none" if form is None else form.kind,
            unit_norm=form is not None and form.unit_norm,
            policy=policy,
            tiles=tiles.fitted(projections, values),
            head_size=size,
            projections=projections,
            features=2 * projections if form is not None and form.kind == "gaussian" else projections,
        )

    @property
    def scale(self) -> float:
        """The factor of features."""
        return float(self.projections**-0.5) if self.map in ("gaussian", "arc_cosine") else 1.0

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """The constants that the kernels that make features are compiled for."""
        return {
            "MAP": self.map,
            "UNIT": self.unit_norm,
            "PRECISION": precision(dtype),
            "T": self.tiles.chunk,
            "BLOCK_D": self.tiles.block_d,
            "BLOCK_V": self.tiles.block_v,
            "BLOCK_X": power_tile(self.head_size),
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
        }


class Stretch(NamedTuple):
    """The tokens of one set of launches.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], last dimension contiguous; w see `map_operand`; log_gate, key_scale
        [B, H, L] contiguous; documents int32 [N T], how many documents have started in this stretch so far.
    """

    plan: KernelPlan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    log_gate: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """G."""
        return self.v.shape[0] * self.v.shape[1]

    @property
    def tokens(self) -> int:
        """L."""
        return self.v.shape[2]

    @property
    def chunks(self) -> int:
        """N."""
        return blocks(self.tokens, self.plan.tiles.chunk)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory for every group, on the device of the tokens."""
        return torch.empty((self.groups, *shape), dtype=dtype, device=self.v.device)

    def ones(self) -> torch.Tensor:
        """[G, N T]."""
        return torch.ones((self.groups, self.chunks * self.plan.tiles.chunk), device=self.v.device)

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """[..., B, H, L] -> float32 [..., G, N T], with zeros behind."""
        return filled_up(x.flatten(-3, -2).float(), self.chunks * self.plan.tiles.chunk)

    def sizes(self, size: int, values: int) -> tuple[int | float, ...]:
        """L, N, H, K, D, M, V and the scale of features, as kernels take them."""
        plan = self.plan
        heads = self.v.shape[1]
        return self.tokens, self.chunks, heads, size, plan.projections, plan.features, values, plan.scale

    @property
    def options(self) -> dict[str, bool]:
        """The optional inputs that are there, as flags of kernels."""
        return {
            "HAS_GATE": self.log_gate is not None,
            "HAS_SCALE": self.key_scale is not None,
            "HAS_DOCUMENTS": self.documents is not None,
        }


class Gates(NamedTuple):
    """The gates of every token [G, N T] and of every chunk [G, N]; see `gates_kernel`. Zeros fill the key scale up."""

    decay: torch.Tensor
    left: torch.Tensor
    read: torch.Tensor
    gain: torch.Tensor
    key_scale: torch.Tensor | None

    @property
    def kept(self) -> torch.Tensor:
        """The weight of each token in the state after the chunk."""
        return self.left if self.key_scale is None else self.left * self.key_scale


class TokenWeights(NamedTuple):
    """The weights of every token [G, N T]: of its values, of its features in z, and of its mass."""

    values: torch.Tensor
    z: torch.Tensor
    mass: torch.Tensor

    @staticmethod
    def all(weight: torch.Tensor) -> "TokenWeights":
        """Take one weight for all three."""
        return TokenWeights(weight, weight, weight)


class StateSums(NamedTuple):
    """Sums over keys, or what is of their kind: S [..., M, V], and z beside the mass [..., M + 1]."""

    s: torch.Tensor
    zm: torch.Tensor


class Scanned(NamedTuple):
    """The state before each chunk as it enters products, the one after the last, and [G, N] products of the former."""

    before: StateSums
    end: StateSums
    products: torch.Tensor | None


class Attended(NamedTuple):
    """Outputs [B, H, L, V], denominators before any policy and masses [B, H, L]."""

    out: torch.Tensor
    den: torch.Tensor
    mass: torch.Tensor


def precision(dtype: torch.dtype) -> str:
    """The precision in which tiles enter matrix units; see `triton_features`."""
    if dtype == torch.bfloat16:
        return "bf16_interpreted" if INTERPRETED else "bf16"
    return "fp16" if dtype == torch.float16 else "ieee"


def map_operand(w_HDK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """w as kernels over inputs of this type read it: float32, or for 16 bits two parts of them, [H, 2, D, K].

    Their sum is w. Every chunk would have to make them again.
    """
    w_HDK = w_HDK.float().contiguous()
    if dtype == torch.float32:
        return w_HDK
    parts = w_HDK.new_empty((w_HDK.shape[0], 2, *w_HDK.shape[1:]), dtype=dtype)
    torch.sub(w_HDK, parts[:, 0].copy_(w_HDK), out=parts[:, 1])
    return parts


def gates(stretch: Stretch) -> Gates:
    """Cumulative gates, and what they leave of keys and states."""
    chunk, chunks = stretch.plan.tiles.chunk, stretch.chunks
    decay, left, read = (stretch.empty(chunks * chunk) for _ in range(3))
    gain = stretch.empty(chunks)
    gates_kernel[(gain.numel(),)](
        either(stretch.log_gate, left), either(stretch.documents, left), decay, left, read, gain, stretch.tokens,
        chunks, HAS_GATE=stretch.log_gate is not None, HAS_DOCUMENTS=stretch.documents is not None,
        CLOSED=CLOSED_GATE, T=chunk, num_warps=8,
    )  # fmt: skip
    return Gates(decay, left, read, gain, None if stretch.key_scale is None else stretch.filled(stretch.key_scale))


def sequence_sums(
    stretch: Stretch, x: torch.Tensor, y: torch.Tensor, weights: TokenWeights, dtype: torch.dtype
) -> StateSums:
    """Sums of features of x and values y over all tokens, [G, M, V] and [G, M + 1], in products of `dtype`."""
    gain = stretch.empty(stretch.chunks).fill_(1.0)
    sums = _sums(stretch, x, y, weights, gain, dtype, _length(stretch, y, twice=False))
    return StateSums(sums.s.sum(1), sums.zm.sum(1))


def states(
    stretch: Stretch,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: TokenWeights,
    start: StateSums,
    gain: torch.Tensor,
    dtype: torch.dtype,
    *,
    reverse: bool = False,
    other: StateSums | None = None,
) -> Scanned:
    """The states before all chunks (after them, in reverse) from `start`, [G, M, V] and [G, M + 1].

    A chunk adds `sequence_sums` of its own to what its gain [G, N] leaves. Products are those with `other`.
    """
    plan, length, values = stretch.plan, _length(stretch, y, twice=True), y.shape[3]
    splits = blocks(stretch.chunks, length)
    starts = StateSums(start.s.unsqueeze(1), start.zm.unsqueeze(1))
    if splits > 1:
        starts = _sums(stretch, x, y, weights, gain, dtype, length, reverse=reverse)
        kept = filled_up(gain, splits * length, 1.0).view(-1, splits, length).prod(-1)
        for sums, first in zip(starts, start, strict=True):
            elements = first.numel() // stretch.groups
            scan_kernel[(stretch.groups, blocks(elements, SCAN_BLOCK))](
                sums, first, kept, splits, elements, REVERSE=reverse, BLOCK=SCAN_BLOCK, num_warps=4,
            )  # fmt: skip
    features = plan.features
    before = StateSums(
        stretch.empty(stretch.chunks, features, values, dtype=tile_dtype(dtype)),
        stretch.empty(stretch.chunks, features + 1),
    )
    end, parts = StateSums(*map(torch.empty_like, start)), _parts(plan, values)
    products = None if other is None else stretch.empty(stretch.chunks, parts)
    _walk(stretch, x, y, weights, gain, starts, before, end, other, products, dtype, length, reverse=reverse)
    return Scanned(before, end, None if products is None else products.sum(-1))


def key_states(stretch: Stretch, gate: Gates, start: StateSums) -> Scanned:
    """`states` of keys and their values."""
    k, v = stretch.k, stretch.v
    return states(stretch, k, v, TokenWeights.all(gate.kept), start, gate.gain, k.dtype)


def _length(stretch: Stretch, y: torch.Tensor, *, twice: bool) -> int:
    """Chunks of a split: as many splits as a GPU walks at a time, and no more, as the rest would wait for all of them.

    Two splits that are walked `twice` take as long as all walked once. Two chunks at least, so that the few tokens of a
    trial are walked as many are.
    """
    tiles, groups = stretch.plan.tiles, stretch.groups
    splits = SUM_PROGRAMS * 4 // (tiles.warps * groups * _parts(stretch.plan, y.shape[3]))
    return max(2, blocks(stretch.chunks, splits if splits > (2 if twice else 1) else 1))


def _parts(plan: KernelPlan, values: int) -> int:
    """Programs that share a state."""
    return blocks(values, plan.tiles.sum_v) * blocks(plan.projections, plan.tiles.sum_d)


def _sums(
    stretch: Stretch,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: TokenWeights,
    gain: torch.Tensor,
    dtype: torch.dtype,
    length: int,
    *,
    reverse: bool = False,
) -> StateSums:
    """Sums over every `length` chunks, [G, splits, M, V] and [G, splits, M + 1]."""
    splits, features = blocks(stretch.chunks, length), stretch.plan.features
    end = StateSums(stretch.empty(splits, features, y.shape[3]), stretch.empty(splits, features + 1))
    _walk(stretch, x, y, weights, gain, None, None, end, None, None, dtype, length, reverse=reverse)
    return end


def _walk(
    stretch: Stretch,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: TokenWeights,
    gain: torch.Tensor,
    start: StateSums | None,
    before: StateSums | None,
    end: StateSums,
    other: StateSums | None,
    products: torch.Tensor | None,
    dtype: torch.dtype,
    length: int,
    *,
    reverse: bool,
) -> None:
    """Fill `end`, and with `start` also `before` and `products`; see `sums_kernel`."""
    plan, values = stretch.plan, y.shape[3]
    splits = blocks(stretch.chunks, length)
    sums_kernel[(stretch.groups * splits * _parts(plan, values),)](
        x, y, stretch.w, *weights, gain, *(start or end), *(before or end), *end, *(other or end),
        either(products, end.zm), *strides(x, y), *stretch.sizes(x.shape[3], values), splits, length,
        HAS_START=start is not None, REVERSE=reverse, WITH_DOT=products is not None,
        ALIKE=weights.values is weights.z,
        **plan.constants(dtype) | {"BLOCK_D": plan.tiles.sum_d, "BLOCK_V": plan.tiles.sum_v},
    )  # fmt: skip


def outputs(stretch: Stretch, gate: Gates, state: StateSums, out: torch.Tensor) -> Attended:
    """Fill `out` [B, H, L, V] from the states before all chunks."""
    (q, k, v), plan = (stretch.q, stretch.k, stretch.v), stretch.plan
    den, mass = (torch.empty(v.shape[:3], device=v.device) for _ in range(2))
    outputs_kernel[(stretch.chunks * stretch.groups, blocks(v.shape[3], plan.tiles.block_v))](
        q, k, v, stretch.w, gate.decay, either(gate.key_scale, den), gate.read, either(stretch.documents, den), *state,
        out, den, mass, *strides(q, k, v, out), *stretch.sizes(q.shape[3], v.shape[3]), plan.policy.eps,
        KIND=plan.policy.kind, **stretch.options, **plan.constants(q.dtype),
    )  # fmt: skip
    return Attended(out, den, mass)


def read(
    stretch: Stretch, x: torch.Tensor, state: StateSums, weight: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, L, V] in `dtype` and denominators [B, H, L] of x that read one state; see `read_kernel`."""
    plan, values = stretch.plan, state.s.shape[2]
    out = torch.empty((*x.shape[:3], values), dtype=dtype, device=x.device)
    den = torch.empty(x.shape[:3], device=x.device)
    read_kernel[(stretch.chunks * stretch.groups, blocks(values, plan.tiles.block_v))](
        x, stretch.w, either(weight, den), *state, out, den, *strides(x, out), *stretch.sizes(x.shape[3], values),
        plan.policy.eps, KIND=plan.policy.kind, HAS_WEIGHT=weight is not None, **plan.constants(x.dtype),
    )  # fmt: skip
    return out, den


def filled_up(x: torch.Tensor, length: int, value: float = 0.0) -> torch.Tensor:
    """x [..., L] of `length`, with `value` behind, in order in memory; x itself where it is that already."""
    behind = length - x.shape[-1]
    return F.pad(x, (0, behind), value=value) if behind else x.contiguous()


def blocks(size: int, block: int) -> int:
    """The number of blocks that cover `size`."""
    return -(-size // block)


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """The strides of batch, head and token of each tensor."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def rowwise(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read it: its last dimension in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tile_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of states that only enter products: sums themselves are always float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels go to the current GPU, so this must be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def either(x: torch.Tensor | None, filler: torch.Tensor) -> torch.Tensor:
    """Fill the place of an input that is not there: a kernel never looks at the filler."""
    return filler if x is None else x
