"""What every Triton kernel, and flash-linear-attention's of linear attention, must give: that of torch's forms.

Outputs, states and gradients are held to those of the streaming forms in float64.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cases import DEVICE, Cases, Row, Shape
from dist_attn.ops import (
    FeatureMap,
    LinearState,
    linear_attention,
    linear_attention_step,
)
from dist_attn.ops.linear_attention import Implementation, LinearCall, absorb, complete_sums, local_sums
from tests.gpu.judging import judged, name_of

__all__ = ["fla_linear_cases", "kernel_cases", "linear_case"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_cases(*, tiny: bool) -> Cases:
    """The sizes of the models that ship first; the first word of a name is the operation, as the record has it."""
    sizes = [(8, 8, 8)] if tiny else [(64, 64, 64), (128, 128, 128), (80, 96, 72)]
    shapes = [Shape(1, 1, *size) if tiny else Shape(2, 2, *size) for size in sizes]
    cases = _linear_cases(shapes, tiny)
    if not tiny:
        return cases
    few = ("linear step gaussian float32", "linear causal gaussian float32")
    return {name: work for name, work in cases.items() if name.startswith(few) and "documents=2" not in name}


def fla_linear_cases() -> Cases:
    """What `auto` may take of flash-linear-attention: causal sequences in bfloat16, and steps; float16 is refused.

    Of one size: for each more it compiles and measures a hundred tiles.
    """
    shapes = [Shape(2, 2, size, size, size) for size in (64, 128)]
    ways = ("causal gaussian bf", "step gaussian bf", "step gaussian float32")
    found = {name: case for name, case in _calls(shapes, tiny=False).items() if name.startswith(ways)}
    taken = {name: case for name, case in found.items() if name[0] == "s" or "x128x128x128" in name}
    return {f"fla {name}": partial(linear_case, "fla", *case) for name, case in taken.items()}


def _linear_cases(shapes: list[Shape], tiny: bool) -> Cases:
    return {f"linear {name}": partial(linear_case, "triton", *case) for name, case in _calls(shapes, tiny).items()}


def _calls(shapes: list[Shape], tiny: bool) -> dict[str, tuple[Any, ...]]:
    """The calls by name, and what `linear_case` takes of each."""
    length, cuts = (21, (3, 17)) if tiny else (1_003, (5, 6, 64, 700))
    found = [
        (way, kind, dtype, shape, gated, documents)
        for shape in shapes
        for kind in ("gaussian", "arc_cosine", "elu")
        for dtype in DTYPES
        for way, gated, documents in (
            ("causal", False, ()),
            ("causal", True, ()),
            ("causal", True, cuts),
            ("full", False, ()),
            ("full", True, ()),
            ("parts", False, ()),
            ("parts", True, ()),
            ("step", True, ()),
        )
        # Of the first sizes all types and ways with the first map; of the others what is causal; all maps in one type.
        if (kind == "gaussian" and (way == "causal" or shape == shapes[0]))
        or (dtype == torch.bfloat16 and gated and not documents and way in ("causal", "step"))
    ]
    if not tiny:
        found.append(("causal", "gaussian", torch.bfloat16, Shape(1, 1, 256, 256, 256), True, ()))
    return {
        f"{case[0]} {case[1]} {name_of(case[2])} {case[3].words} gated={case[4]} documents={len(case[5])}": (
            *case,
            length,
        )
        for case in found
    }


def linear_case(
    kernels: Implementation,
    way: str,
    kind: str,
    dtype: torch.dtype,
    shape: Shape,
    gated: bool,
    documents: tuple[int, ...],
    length: int,
) -> Row:
    """The errors of one way of linear attention: outputs, the state after, gradients."""
    torch.manual_seed(0)
    given, feature_map = shape.inputs(length, dtype, gated=gated), shape.map(kind)
    if way == "step":
        return _step(kernels, given, feature_map, dtype)
    weight = torch.randn(shape.batch, shape.heads, length, shape.values, device=DEVICE)
    attend = _by_parts if way == "parts" else partial(linear_attention, causal=way == "causal", documents=documents)
    found = []
    implementations: tuple[Implementation, ...] = ("streaming", kernels)
    for implementation in implementations:
        wide = implementation == "streaming"
        leaves = {n: (t.double() if wide else t).detach().clone().requires_grad_() for n, t in given.items()}
        tensors = [(t.double() if wide else t).detach().clone().requires_grad_() for t in feature_map.tensors()]
        gates: dict[str, Any] = {name: t for name, t in leaves.items() if name not in "qkv"}
        out, after = attend(
            *(leaves[name] for name in "qkv"),
            feature_map=feature_map.with_tensors(*tensors),
            implementation=implementation,
            **gates,
        )
        ((out.double() * weight).sum() + after.s_BHMV.double().square().mean()).backward()
        grads = {f"grad {name}": t.grad for name, t in leaves.items()}
        grads |= {f"grad map {number}": t.grad for number, t in enumerate(tensors)}
        found.append({"out": out, "state": after.s_BHMV, **grads})
    return judged(found[0], found[1], dtype)


def _step(kernels: Implementation, given: dict[str, torch.Tensor], feature_map: FeatureMap, dtype: torch.dtype) -> Row:
    """Ten decode steps, each after the state that the same implementation left."""
    found = []
    implementations: tuple[Implementation, ...] = ("streaming", kernels)
    for implementation in implementations:
        wide = implementation == "streaming"
        x = {name: t.double() if wide else t for name, t in given.items()}
        phi = feature_map.with_tensors(*(t.double() if wide else t for t in feature_map.tensors()))
        features = phi(x["q"][:, :, :1].double()).shape[-1]
        sizes = (*x["q"].shape[:2], features, x["v"].shape[3])
        state = LinearState.identity(*sizes, device=DEVICE, dtype=torch.float64 if wide else torch.float32)
        outs = []
        for t in range(10):
            q, k, v, gate, scale = (tensor[:, :, t] for tensor in x.values())
            with torch.no_grad():
                out, state = linear_attention_step(
                    q, k, v, state, feature_map=phi, log_gate_BH=gate, key_scale_BH=scale, implementation=implementation
                )  # fmt: skip
            outs.append(out)
        found.append({"out": torch.stack(outs), "state": state.s_BHMV})
    return judged(found[0], found[1], dtype)


def _by_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    feature_map: FeatureMap | None,
    implementation: Implementation,
    **gates: Any,
) -> tuple[torch.Tensor, LinearState]:
    """What a rank computes of a causal pass, here after what another one like it left behind."""
    call = LinearCall(q, k, v, feature_map=feature_map, implementation=implementation, **gates)
    before = absorb(call)
    sums, after = local_sums(call)
    return complete_sums(replace(call, state=before), sums), before.combine(after)
