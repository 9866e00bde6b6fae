"""A function that runs on every rank of a simulated group, as one function of all ranks' inputs that autograd knows.

`torch.autograd.gradcheck` and `gradgradcheck` perturb an input and look at all outputs. Here an input may lie on any
rank and an output on any other: the group runs once per evaluation, and the backward pass is a second run of the group
in which every rank differentiates its own part. That run is again such a function, so it can be differentiated in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated

__all__ = ["across_ranks"]

Tensors = tuple[Tensor, ...]
RankFunction = Callable[[Communicator, Tensors], Tensors]
"""What one rank computes from its inputs; the number of inputs and of outputs is the same on every rank."""


def across_ranks(function: RankFunction, inputs: list[Tensors]) -> list[Tensors]:
    """What `function` returns on each rank, differentiable in every rank's inputs to any order.

    First-order gradients come from the ranks' own backward passes without `create_graph`, higher ones from passes with
    it. Gradients of an output that nothing is asked about are zeros, so every rank runs the same backward pass.
    """
    outputs = _AcrossRanks.apply(function, len(inputs), *(t for own in inputs for t in own))
    return _by_rank(cast(Tensors, outputs), len(inputs))


class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: RankFunction, size: int, *tensors: Tensor) -> Tensors:
        ctx.function, ctx.size = function, size
        ctx.save_for_backward(*tensors)
        inputs = _by_rank(tensors, size)
        needs = _by_rank(ctx.needs_input_grad[2:], size)

        def run(comm: Communicator) -> Tensors:
            with torch.enable_grad():  # as in use: the outputs are differentiable, only nobody differentiates them
                return tuple(t.detach() for t in function(comm, _leaves(inputs[comm.rank], needs[comm.rank])))

        outputs = run_simulated(run, size)
        return tuple(t for own in outputs for t in own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = _by_rank(ctx.saved_tensors, ctx.size)
        needs = _by_rank(ctx.needs_input_grad[2:], ctx.size)
        backward = _Backward(ctx.function, needs, differentiable=torch.is_grad_enabled())
        given = [own + received for own, received in zip(inputs, _by_rank(grads, ctx.size), strict=True)]
        found = [grad for own in across_ranks(backward, given) for grad in own]
        return None, None, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[2:], strict=True))


@dataclass(frozen=True)
class _Backward:
    """One rank's backward pass of `function`: from its inputs and its outputs' gradients to its inputs' gradients."""

    function: RankFunction
    needs: list[tuple[bool, ...]]
    differentiable: bool

    def __call__(self, comm: Communicator, tensors: Tensors) -> Tensors:
        needs = self.needs[comm.rank]
        inputs, grads = tensors[: len(needs)], tensors[len(needs) :]
        leaves = tuple(
            t if t.requires_grad else t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)
        )
        with torch.enable_grad():
            outputs = self.function(comm, leaves)
            pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
            found = torch.autograd.grad(
                [out for out, _ in pairs],
                [leaf for leaf in leaves if leaf.requires_grad],
                [grad for _, grad in pairs],
                create_graph=self.differentiable,
                allow_unused=True,
                materialize_grads=True,
            )
        by_leaf = iter(found)
        return tuple(next(by_leaf) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves)


def _leaves(tensors: Tensors, needs: tuple[bool, ...]) -> Tensors:
    return tuple(t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True))


def _by_rank(flat: tuple[Any, ...], size: int) -> list[tuple[Any, ...]]:
    each = len(flat) // size
    return [tuple(flat[rank * each : (rank + 1) * each]) for rank in range(size)]
