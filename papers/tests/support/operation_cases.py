"""One small case for each operation of the papers over ranks, as in `tests.sharded.operation_cases`."""

import torch
from torch import Tensor

from dist_attn.ops import SequenceOps
from dist_attn_papers.ops import Interpolation, route_tokens, select_tokens
from tests.sharded.operation_cases import Case, Tensors

__all__ = ["CASES"]


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


CASES = {
    "selection": _selection(0.0, None, Interpolation()),
    "selection of the best one": _selection(9.0, None, Interpolation("knn", 2)),
    "selection of at most so many": _selection(-9.0, 2, Interpolation("knn", 2)),
    "routing": _routing(1, 2),
    "routing, two choices": _routing(2, 3),
}
