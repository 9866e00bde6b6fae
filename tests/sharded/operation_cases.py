"""One small case for each operation and mode over ranks: what is cut, what is replicated, what is computed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_attn import feature_maps
from dist_attn.ops import AffineState, Denominator, LinearState, SequenceOps

__all__ = ["AFFINE_CASES", "CASES", "KERNEL_CASES", "Case", "Tensors", "inputs_of", "linear", "softmax", "tokens"]

BATCH, HEADS, SIZE, VALUES = 1, 2, 2, 2

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One operation: which inputs are cut along which dimension, which are equal on all ranks, and what it computes."""

    sliced: dict[str, tuple[tuple[int, ...], int]]  # sizes before the tokens, size after them
    replicated: dict[str, tuple[int, ...]]
    run: Callable[[SequenceOps, dict[str, Tensor]], Tensors]


def linear(*, causal: bool, gated: bool, given_state: bool, prefix: int = 0) -> Case:
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES)}
    replicated = {"sigma": (HEADS, 1, SIZE), "w": (HEADS, 2, SIZE)}
    if gated:
        sliced |= {"gate": (per_head, 0), "scale": (per_head, 0)}
    if given_state:
        replicated |= {"s": (*per_head, 4, VALUES), "z": (*per_head, 4), "mass": per_head, "log_decay": per_head}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        state = None
        if given_state:
            no = torch.zeros(per_head, dtype=torch.bool, device=x["s"].device)
            state = LinearState(x["s"], x["z"], x["mass"].exp(), x["log_decay"], no)
        out, after = ops.linear_attention(
            x["q"],
            x["k"],
            x["v"],
            feature_map=feature_maps.Gaussian(x["sigma"] * x["w"], unit_norm=True),
            log_gate_BHS=torch.nn.functional.logsigmoid(x["gate"]) if gated else None,
            key_scale_BHS=torch.sigmoid(-x["scale"]) if gated else None,
            causal=causal,
            state=state,
            denominator=Denominator("floor", 0.3),
            prefix=prefix,
        )
        return (out, *after.tensors()[:4])

    return Case(sliced, replicated, run)


def softmax(*, causal: bool, groups: int, prefix: int = 0) -> Case:
    sliced = {"q": ((BATCH, 2 * groups), SIZE), "k": ((BATCH, groups), SIZE), "v": ((BATCH, groups), VALUES)}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        return (ops.softmax_attention(x["q"], x["k"], x["v"], causal=causal, prefix=prefix),)

    return Case(sliced, {}, run)


def affine(*, erases: bool, channels: bool, before: bool = False) -> Case:
    """A recurrence with a decay for each head or for each of its channels, from a state."""
    per_head = (BATCH, HEADS)
    sliced = dict.fromkeys(("q", "k", "a", "b"), (per_head, SIZE)) | {"v": (per_head, VALUES)}
    sliced["decay"] = (per_head, SIZE if channels else 1)
    replicated = {"s": (*per_head, SIZE, VALUES)} | ({"bonus": (HEADS, SIZE)} if before else {})

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        out, after = ops.affine_recurrence(
            x["q"],
            x["k"],
            x["v"],
            log_decay_BHLK=torch.nn.functional.logsigmoid(x["decay"]),
            erase=(x["a"].tanh(), x["b"].tanh()) if erases else None,
            bonus_HK=x["bonus"] if before else None,
            read="before" if before else "after",
            state=AffineState.from_sums(x["s"]),
        )
        return out, after.s_BHKV

    return Case(sliced if erases else {n: v for n, v in sliced.items() if n not in "ab"}, replicated, run)


def delta(*, channels: bool) -> Case:
    """The gated delta rule without a state before."""
    per_head = (BATCH, HEADS)
    sliced = {"q": (per_head, SIZE), "k": (per_head, SIZE), "v": (per_head, VALUES), "beta": (per_head, 0)}
    sliced["decay"] = (per_head, SIZE if channels else 1)

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        decay = torch.nn.functional.logsigmoid(x["decay"])
        beta, k = 2 * x["beta"].sigmoid(), torch.nn.functional.normalize(x["k"], dim=-1)
        out, after = ops.gated_delta_rule(x["q"], k, x["v"], beta_BHL=beta, log_decay_BHLK=decay)
        return out, after.s_BHKV

    return Case(sliced, {}, run)


def tokens(run: Callable[[SequenceOps, dict[str, Tensor]], Tensors], **replicated: tuple[int, ...]) -> Case:
    return Case({"x": ((BATCH,), 3)}, replicated, run)


def _gated_scan() -> Case:
    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        return ops.gated_scan(x["x"], torch.nn.functional.logsigmoid(x["gate"]), state=x["state"])

    return Case({"x": ((BATCH,), 3), "gate": ((BATCH,), 3)}, {"state": (BATCH, 3)}, run)


def _selective_scan() -> Case:
    sliced = {"x": ((BATCH,), 3), "dt": ((BATCH,), 3), "b": ((BATCH,), 2), "c": ((BATCH,), 2)}

    def run(ops: SequenceOps, x: dict[str, Tensor]) -> Tensors:
        dt_BLD, a_DN = torch.nn.functional.softplus(x["dt"]), -x["a"].exp()
        return ops.selective_scan(x["x"], dt_BLD, a_DN, x["b"], x["c"], skip_D=x["skip"], state=x["state"])

    return Case(sliced, {"a": (3, 2), "skip": (3,), "state": (BATCH, 3, 2)}, run)


KERNEL_CASES = {
    "linear": linear(causal=True, gated=False, given_state=False),
    "linear, gated, from a state": linear(causal=True, gated=True, given_state=True),
    "linear, full, gated, from a state": linear(causal=False, gated=True, given_state=True),
    "linear, gated, with a prefix": linear(causal=True, gated=True, given_state=False, prefix=3),
}
AFFINE_CASES = {
    "affine, a decay per head": affine(erases=False, channels=False),
    "affine, a decay per channel, read before": affine(erases=False, channels=True, before=True),
    "affine, erasing": affine(erases=True, channels=True),
    "delta rule": delta(channels=False),
    "delta rule, a decay per channel": delta(channels=True),
}
CASES = (
    KERNEL_CASES
    | AFFINE_CASES
    | {
        "softmax": softmax(causal=True, groups=1),
        "softmax, full": softmax(causal=False, groups=2),
        "softmax, with a prefix": softmax(causal=True, groups=1, prefix=3),
        "convolve": tokens(lambda ops, x: (ops.convolve(x["x"], x["w"]),), w=(4, 3)),
        "convolve, centred": tokens(lambda ops, x: (ops.convolve(x["x"], x["w"], centred=True),), w=(3, 3)),
        "convolve, streaming": tokens(
            lambda ops, x: ops.convolve_streaming(x["x"], x["w"], x["tail"]), w=(4, 3), tail=(BATCH, 3, 3)
        ),
        "gated scan": _gated_scan(),
        "selective scan": _selective_scan(),
        "sum": tokens(lambda ops, x: (x["x"], ops.sum_over_sequence(x["x"]))),
        "sum over documents": tokens(lambda ops, x: (x["x"], ops.sum_over_documents(x["x"]))),
    }
)


def inputs_of(case: Case, total: int) -> tuple[list[str], Tensors]:
    """Names and random values of all inputs, those that are cut with `total` tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*before, total, *((after,) if after else ())) for before, after in case.sliced.values()]
    inputs = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (*shapes, *case.replicated.values())
    )
    return [*case.sliced, *case.replicated], tuple(inputs)
