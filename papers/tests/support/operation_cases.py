"""One small case for each operation of the papers over ranks, as in `tests.sharded.operation_cases`."""

import torch
from torch import Tensor

from dist_attn import feature_maps
from dist_attn.ops import SequenceOps
from dist_attn_papers.ops import (
    Interpolation,
    LegsState,
    RelativeState,
    dense_scan,
    diagonal_scan,
    fourier_mix,
    legs_memory,
    long_convolve,
    mix_tokens,
    relative_attention,
    relative_attention_streaming,
    route_tokens,
    select_tokens,
)
from dist_attn_papers.ops.relative_attention import WindowState
from tests.sharded.operation_cases import BATCH, HEADS, SIZE, VALUES, Case, Tensors, tokens

__all__ = ["CASES", "RELATIVE_CASES"]


def _selection(threshold: float, at_most: int | None, how: Interpolation) -> Case:
    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        kept = select_tokens(x["x"], x["score"], threshold=threshold, at_most=at_most, ops=ops)
        return kept.x_NC, kept.upsample(kept.x_NC * kept.x_NC.flip(1), how)

    return Case({"x": ((), 3), "score": ((), 0)}, {}, run)


def _routing(choices: int, capacity: int) -> Case:
    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        first_L = 2 * (x["choice"] > 0).long()
        expert_LK = torch.stack([first_L, 2 - first_L], dim=1)[:, :choices]
        routed = route_tokens(x["x"], expert_LK, num_experts=3, capacity=capacity, ops=ops)
        return (routed.restore_order(torch.cat([rows.cumsum(0).square() for rows in routed.by_expert()])),)

    return Case({"x": ((), 3), "choice": ((), 0)}, {}, run)


def _diagonal() -> Case:
    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        a, b, c, state = (torch.view_as_complex(x[name]) for name in ("a", "b", "c", "state"))
        out, after = diagonal_scan(x["x"], a, b, c, state=state, ops=ops)
        return out, torch.view_as_real(after)

    return tokens(run, a=(3, 2, 2), b=(3, 2, 2), c=(3, 2, 2), state=(BATCH, 3, 2, 2))


def _legs(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
    seen_B = torch.full((BATCH,), 5, device=x["x"].device)
    y, after = legs_memory(x["x"], x["read"], state=LegsState(x["state"], seen_B), ops=ops)
    return y, after.c_BDN


def _relative(*, causal: bool, reach: int) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        q, k, rp = (feature_maps.elu_plus_one(x[name]) for name in ("q", "k", "rp"))
        return (relative_attention(q, k, x["v"], rp, causal=causal, ops=ops),)

    return Case(sliced, {"rp": (HEADS, 2 * reach + 1, SIZE)}, run)


def _relative_streaming(*, reach: int) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}
    columns = VALUES + 1
    replicated = {"rp": (HEADS, 2 * reach + 1, SIZE), "sums": (*per_head, SIZE, columns), "far": (*per_head, columns)}
    replicated["near"] = (*per_head, max(reach - 1, 0), columns)

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        q, k, rp = (feature_maps.elu_plus_one(x[name]) for name in ("q", "k", "rp"))
        # Sums of positive weights, so that no denominator comes near 0.
        state = RelativeState(x["sums"].exp(), WindowState(x["far"].exp(), x["near"].exp(), 3))
        out, after = relative_attention_streaming(q, k, x["v"], rp, state, ops=ops)
        return out, after.sz_BHMW, after.window.far_BHW, after.window.near_BHTW

    return Case(sliced, replicated, run)


RELATIVE_CASES = {
    "relative": _relative(causal=True, reach=2),
    "relative, no reach": _relative(causal=True, reach=0),
    "relative, full": _relative(causal=False, reach=2),
    "relative, from a state": _relative_streaming(reach=3),
}
CASES = RELATIVE_CASES | {
    "fourier": tokens(lambda ops, x: (fourier_mix(x["x"], norm="ortho", ops=ops),)),
    "long convolution": tokens(lambda ops, x: (long_convolve(x["x"], x["k"], ops=ops),), k=(7, 3)),
    "long convolution, both ways": tokens(
        lambda ops, x: (long_convolve(x["x"], x["k"], backward_kernel_LD=x["ahead"], ops=ops),), k=(7, 3), ahead=(2, 3)
    ),
    "token mixing": tokens(
        lambda ops, x: (mix_tokens(x["x"], x["w"], x["w"].T, bias_in_S=x["b"], ops=ops),), w=(5, 4), b=(4,)
    ),
    "diagonal scan": _diagonal(),
    "dense scan": tokens(
        lambda ops, x: dense_scan(x["x"], x["a"], x["b"], x["c"], state=x["state"], ops=ops),
        a=(3, 2, 2),
        b=(3, 2),
        c=(3, 2, 2),
        state=(BATCH, 3, 2),
    ),
    "LegS memory": tokens(_legs, read=(3, 4), state=(BATCH, 3, 4)),
    "selection": _selection(0.0, None, Interpolation()),
    "selection of the best one": _selection(9.0, None, Interpolation("knn", 2)),
    "selection of at most so many": _selection(-9.0, 2, Interpolation("knn", 2)),
    "routing": _routing(1, 2),
    "routing, two choices": _routing(2, 3),
}
