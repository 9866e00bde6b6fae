"""Operations by kernels that have a backward pass of their own, differentiable to any order.

Autograd cannot look into such a backward pass. A gradient that is to be differentiated again therefore goes through the
same function in operations that autograd knows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from dist_attn.ops.scan import plain_gradients
from dist_attn.ops.watch import watching

Each = TypeVar("Each")
# A named tuple of an operation's tensors, or of their gradients; None where there is no such tensor.
Named = TypeVar("Named", bound=tuple[torch.Tensor | None, ...])
Tensors = tuple[torch.Tensor | None, ...]


class KernelOperation(ABC, Generic[Named]):
    """One call of kernels as a function of named tensors, whose results and gradients are named too."""

    @abstractmethod
    def forward(self, x: Named, *, keep: bool) -> tuple[Tensors, Tensors]:
        """The results and, with `keep`, the tensors that `backward` needs beside the inputs."""

    @abstractmethod
    def backward(self, x: Named, needs: Named, grads: Tensors, kept: Tensors) -> Named:
        """The gradients of the tensors, where `needs` is true, from those of the results."""

    @abstractmethod
    def replay(self, x: Named) -> Tensors:
        """The results by operations that autograd knows."""

    def for_backward(self) -> "KernelOperation[Named]":
        """The operation as a graph may hold it: without memory that its results are written to."""
        return self

    def __call__(self, x: Named) -> Tensors:
        if not torch.is_grad_enabled():
            # Without autograd's own work, which takes as long as a kernel does for one token.
            return self.forward(x, keep=False)[0]
        results: Tensors = _Kernels.apply(self, type(x), *x)  # type: ignore[no-untyped-call]
        return results


def present(x: torch.Tensor | None) -> torch.Tensor:
    """A tensor that is never left out."""
    assert x is not None
    return x


def gradients_of_replay(
    replay: Callable[[Named], Tensors], tensors: Named, needs: Sequence[bool], grads: Tensors
) -> Named:
    """The gradients of all tensors as differentiable functions of the tensors and of `grads`, those of the results."""
    # Aliases, so that gradients stop here and do not run on into what the inputs were computed from.
    aliases = (t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needs, strict=True))
    inputs = type(tensors)(*aliases)  # type: ignore[arg-type]  # a named tuple takes its fields one by one
    with watching(None):
        results = replay(inputs)
    return type(tensors)(*plain_gradients(results, tuple(grads), inputs, needs))  # type: ignore[arg-type]


def gradients_again(results: Callable[[Named], Tensors], x: Named, needs: Named, grads: Tensors) -> Named:
    """The gradients by the results' own backward pass, of results that are made again for it."""
    named = type(x)
    leaves = named(*(None if t is None else t.detach().requires_grad_(bool(n)) for t, n in zip(x, needs, strict=True)))  # type: ignore[arg-type]
    with torch.enable_grad(), watching(None):
        made = results(leaves)
    pairs = [(present(r), g) for r, g in zip(made, grads, strict=True) if present(r).requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    roots, of_roots = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(roots, wanted, of_roots, allow_unused=True))
    return named(*(next(found) if t is not None and t.requires_grad else None for t in leaves))  # type: ignore[arg-type]


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: KernelOperation[Any], named: type, *tensors: torch.Tensor | None) -> Any:
        keep = any(ctx.needs_input_grad)
        results, kept = operation.forward(named(*tensors), keep=keep)
        ctx.operation, ctx.named, ctx.num_inputs = operation.for_backward(), named, len(tensors)
        if keep:
            ctx.save_for_backward(*tensors, *kept)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors  # read once: where activations are computed again, each reading would do so
        x, kept = ctx.named(*saved[: ctx.num_inputs]), saved[ctx.num_inputs :]
        needs = ctx.named(*ctx.needs_input_grad[2:])
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, None, *gradients_of_replay(ctx.operation.replay, x, needs, grads))
        return (None, None, *ctx.operation.backward(x, needs, grads, kept))
