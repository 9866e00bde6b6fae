"""A loop over blocks of a sequence whose memory does not grow with the sequence, forward or backward.

The forward pass keeps the carry only at every sqrt(N)-th block. The backward pass walks the blocks from the
last to the first: it re-derives the carries of one stretch from its kept one, then differentiates block after
block. One driver serves causal attention, state absorption and read-out, so their gradients are one piece of code.

`_plain_scan` is the same loop as plain torch operations: differentiable to any order, memory grows with the length. A
backward pass that is itself to be differentiated (`create_graph=True`) needs it, and so does a compiler, which wants
operations that it knows instead of a Function with a loop in its backward pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch

from dist_attn.ops.device import without_autocast
from dist_attn.ops.watch import watching

Tensors = tuple[torch.Tensor, ...]
MaybeTensors = tuple[torch.Tensor | None, ...]


class BlockBody(Protocol):
    """One block of work. Sequence tensors are sliced along dim 2; parameters are whole.

    `has_output` says whether `run` gives an output slice; a body without a carry takes and gives ().
    """

    @property
    def has_output(self) -> bool: ...

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        """The block's output slice (or None) and the carry after it."""
        ...

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        """Compute only the carry after the block."""
        ...


@dataclass(frozen=True)
class StateOnly:
    """A body without outputs, made of the `step` that gives the carry after a block."""

    step: Callable[[MaybeTensors, Tensors, Tensors], Tensors]
    has_output = False

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        return None, self.step(sequence, carry, parameters)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        return self.step(sequence, carry, parameters)


@dataclass(frozen=True)
class OutputOnly:
    """A body without a carry, made of the `step` that gives a block's output."""

    step: Callable[[MaybeTensors, Tensors], torch.Tensor]
    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        return self.step(sequence, parameters), ()

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        return ()


def _slices(sequence: MaybeTensors, start: int, stop: int) -> MaybeTensors:
    """Tokens [start, stop) of every sequence tensor."""
    return tuple(None if t is None else t[:, :, start:stop] for t in sequence)


class _Plan(NamedTuple):
    body: BlockBody
    blocks: tuple[tuple[int, int], ...]
    num_sequence: int
    num_carry: int
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype


def scan(
    body: BlockBody,
    blocks: Sequence[tuple[int, int]],
    sequence: MaybeTensors,
    carry: Tensors,
    parameters: Tensors,
    *,
    output_shape: tuple[int, ...] = (),
    output_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Tensors]:
    """Run `body` over `blocks` (token ranges of dim 2) from first to last.

    Returns the outputs of all blocks side by side along dim 2, shape `output_shape` (empty for a body without
    output), and the carry after the last block. Differentiable in every tensor, to any order; only the first order has
    memory that does not grow with the length.
    """
    plan = _Plan(body, tuple(blocks), len(sequence), len(carry), output_shape, output_dtype)
    if torch.compiler.is_compiling():
        return _plain_scan(plan, sequence, carry, parameters)
    results = cast(Tensors, _Scan.apply(plan, *sequence, *carry, *parameters))  # type: ignore[no-untyped-call]
    if body.has_output:
        return results[0], results[1:]
    return results[0].new_empty(0), results


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor | None) -> Any:
        sequence, carry, parameters = _split(plan, tensors)
        stride = max(1, math.isqrt(len(plan.blocks)))
        kept: list[torch.Tensor] = []
        device = next(t for t in tensors if t is not None).device
        output = torch.empty(plan.output_shape, dtype=plan.output_dtype, device=device)
        keep = any(ctx.needs_input_grad)
        with without_autocast(device):
            for number, (start, stop) in enumerate(plan.blocks):
                if keep and number % stride == 0:
                    kept.extend(carry)
                out, carry = plan.body.run(_slices(sequence, start, stop), carry, parameters)
                if out is not None:
                    output[:, :, start:stop] = out
        ctx.plan, ctx.stride, ctx.num_inputs = plan, stride, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        # A carry that came through untouched must not be returned as the input itself.
        after = tuple(c.clone() if any(c is t for t in tensors) else c for c in carry)
        return (output, *after) if plan.body.has_output else after

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        plan: _Plan = ctx.plan
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        # Autograd turns gradients on inside backward if, and only if, this pass is to be differentiated in its turn.
        if torch.is_grad_enabled():
            return (None, *_composite(plan, tensors, ctx.needs_input_grad[1:], grads))
        sequence, _, parameters = _split(plan, tensors)
        needs = ctx.needs_input_grad[1:]
        grad_output = grads[0] if plan.body.has_output else None
        grad_carry = tuple(grads[1:] if plan.body.has_output else grads)
        totals = _Gradients(plan, tensors, needs, grad_carry)
        starts = list(range(0, len(plan.blocks), ctx.stride))
        device = next(t for t in tensors if t is not None).device
        # The forward pass has reported already: nothing is reported twice.
        with without_autocast(device), watching(None):
            for index in reversed(range(len(starts))):
                first = starts[index]
                blocks = plan.blocks[first : first + ctx.stride]
                carry: Tensors = kept[index * plan.num_carry : (index + 1) * plan.num_carry]
                carries = [carry]
                with torch.no_grad():
                    for start, stop in blocks[:-1]:
                        carry = plan.body.advance(_slices(sequence, start, stop), carry, parameters)
                        carries.append(carry)
                for (start, stop), carry in zip(reversed(blocks), reversed(carries), strict=True):
                    # A strided view's products may be rounded in a way that depends on the length of the whole.
                    grad_block = None if grad_output is None else grad_output[:, :, start:stop].contiguous()
                    totals.add_block(start, stop, _slices(sequence, start, stop), carry, parameters, grad_block)
        return (None, *totals.results())


def _composite(plan: _Plan, tensors: MaybeTensors, needs: Sequence[bool], grads: Tensors) -> list[torch.Tensor | None]:
    """The gradients of all inputs as differentiable functions of the inputs and of `grads`."""
    # Aliases, so that gradients stop here and do not run on into what the inputs were computed from.
    inputs = tuple(t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needs, strict=True))
    with watching(None):
        output, carry = _plain_scan(plan, *_split(plan, inputs))
    results = (output, *carry) if plan.body.has_output else carry
    return plain_gradients(results, grads, inputs, needs)


def _split(plan: _Plan, tensors: MaybeTensors) -> tuple[MaybeTensors, Tensors, Tensors]:
    first, second = plan.num_sequence, plan.num_sequence + plan.num_carry
    # Only the sequence has optional members: gates, key scales.
    return tensors[:first], cast(Tensors, tensors[first:second]), cast(Tensors, tensors[second:])


class _Gradients:
    """The gradients of all inputs, filled block by block from the last block to the first."""

    def __init__(self, plan: _Plan, tensors: MaybeTensors, needs: Sequence[bool], grad_carry: MaybeTensors) -> None:
        self._plan, self._needs = plan, needs
        self._carry = grad_carry
        sequence, _, parameters = _split(plan, tensors)
        self._sequence = [
            torch.empty_like(t) if need and t is not None else None for t, need in zip(sequence, needs, strict=False)
        ]
        parameter_needs = needs[plan.num_sequence + plan.num_carry :]
        self._parameters = [
            torch.zeros_like(t) if need and t is not None else None
            for t, need in zip(parameters, parameter_needs, strict=True)
        ]

    def add_block(
        self,
        start: int,
        stop: int,
        sequence: MaybeTensors,
        carry: Tensors,
        parameters: Tensors,
        grad_block: torch.Tensor | None,
    ) -> None:
        first = len(sequence)
        leaves = [
            None if t is None else t.detach().requires_grad_(want)
            for t, want in zip(
                (*sequence, *carry, *parameters),
                (
                    *(g is not None for g in self._sequence),
                    *(True for _ in carry),
                    *(g is not None for g in self._parameters),
                ),
                strict=True,
            )
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with torch.enable_grad():
            out, after = self._plan.body.run(*_split(self._plan, tuple(leaves)))
        roots, root_grads = [], []
        for root, grad in zip((out, *after), (grad_block, *self._carry), strict=True):
            if root is not None and grad is not None and root.requires_grad:
                roots.append(root)
                root_grads.append(grad.to(root.dtype))
        found = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True, materialize_grads=True))
        grads = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        for total, grad in zip(self._sequence, grads[:first], strict=True):
            if total is not None and grad is not None:
                total[:, :, start:stop] = grad
        self._carry = tuple(grads[first : first + len(carry)])
        for total, grad in zip(self._parameters, grads[first + len(carry) :], strict=True):
            if total is not None and grad is not None:
                total += grad

    def results(self) -> list[torch.Tensor | None]:
        """One gradient per input, None where none was asked for."""
        carry_needs = self._needs[self._plan.num_sequence : self._plan.num_sequence + self._plan.num_carry]
        carry = [grad if need else None for grad, need in zip(self._carry, carry_needs, strict=True)]
        return [*self._sequence, *carry, *self._parameters]


def _plain_scan(
    plan: _Plan, sequence: MaybeTensors, carry: Tensors, parameters: Tensors
) -> tuple[torch.Tensor, Tensors]:
    """Compute what `scan` does, bit for bit, with every operation in autograd's graph."""
    device = next(t for t in (*sequence, *carry, *parameters) if t is not None).device
    outputs = []
    with without_autocast(device):
        for start, stop in plan.blocks:
            out, carry = plan.body.run(_slices(sequence, start, stop), carry, parameters)
            if out is not None:
                outputs.append(out.to(plan.output_dtype))
    if outputs:
        return torch.cat(outputs, dim=2), carry
    # No tokens, but the way back is still every rank's: what comes out depends on all that went in.
    nothing = _nothing((*sequence, *carry, *parameters))
    empty = torch.empty(plan.output_shape, dtype=plan.output_dtype, device=device) + nothing.to(plan.output_dtype)
    return empty, carry if plan.blocks else tuple(c + nothing.to(c.dtype) for c in carry)


def _nothing(tensors: MaybeTensors) -> torch.Tensor:
    """Zero, as the sum of no elements of each tensor: zero whatever the values are, where 0 * inf would be NaN."""
    real = [t.real if t.is_complex() else t for t in tensors if t is not None]
    return torch.stack([t.reshape(-1)[:0].sum().double() for t in real]).sum()


def plain_gradients(
    results: Sequence[torch.Tensor | None], grads: MaybeTensors, inputs: MaybeTensors, needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of `inputs`, None where `needs` says so, as functions of whatever `results` and `grads` are.

    Each of them reaches all that was given, if only by a term that is zero: an empty rank's gradients depend on
    nothing, but inputs and gradients may come out of an exchange, and the way back through it is every rank's.
    """
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r is not None and g is not None]
    roots = [(root, grad.to(root.dtype)) for root, grad in pairs if root.requires_grad]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    found: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if roots:
        firsts, seconds = zip(*roots, strict=True)
        found = torch.autograd.grad(firsts, wanted, seconds, create_graph=True, allow_unused=True)
    nothing = _nothing((*wanted, *(grad for _, grad in pairs)))
    linked = iter(
        (torch.zeros_like(t) if g is None else g) + nothing.to(t.dtype) for t, g in zip(wanted, found, strict=True)
    )
    return [next(linked) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)]
