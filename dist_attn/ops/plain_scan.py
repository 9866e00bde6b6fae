"""The walk of `checkpointed_scan` as plain torch operations: differentiable to any order, memory grows with the length.

Two callers need it: a backward pass that is itself to be differentiated (`create_graph=True`), and a compiler, which
wants operations that it knows instead of a Function with a loop in its backward pass.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["BlockBody", "plain_gradients", "plain_scan", "slices"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]


class BlockBody(Protocol):
    """One block of work. Sequence tensors are sliced along dim 2; parameters are whole.

    `has_output` says whether `run` gives an output slice; a body without a carry takes and gives ().
    """

    has_output: bool

    def run(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> tuple[torch.Tensor | None, _Tensors]:
        """The block's output slice (or None) and the carry after it."""
        ...

    def advance(self, sequence: _Optional, carry: _Tensors, parameters: _Tensors) -> _Tensors:
        """Only the carry after the block."""
        ...


def slices(sequence: _Optional, start: int, stop: int) -> _Optional:
    """Tokens [start, stop) of every sequence tensor."""
    return tuple(None if t is None else t[:, :, start:stop] for t in sequence)


def plain_scan(
    body: BlockBody,
    blocks: Sequence[tuple[int, int]],
    sequence: _Optional,
    carry: _Tensors,
    parameters: _Tensors,
    *,
    output_shape: tuple[int, ...],
    output_dtype: torch.dtype,
) -> tuple[torch.Tensor, _Tensors]:
    """What `checkpointed_scan.scan` gives, bit for bit, with every operation in autograd's graph."""
    device = next(t for t in (*sequence, *carry, *parameters) if t is not None).device
    outputs = []
    with torch.autocast(device.type, enabled=False):
        for start, stop in blocks:
            out, carry = body.run(slices(sequence, start, stop), carry, parameters)
            if out is not None:
                outputs.append(out.to(output_dtype))
    if outputs:
        return torch.cat(outputs, dim=2), carry
    # No tokens, but the way back is still every rank's: what comes out depends on all that went in.
    nothing = _nothing((*sequence, *carry, *parameters))
    empty = torch.empty(output_shape, dtype=output_dtype, device=device) + nothing.to(output_dtype)
    return empty, carry if blocks else tuple(c + nothing.to(c.dtype) for c in carry)


def _nothing(tensors: _Optional) -> torch.Tensor:
    """Zero, as the sum of no elements of each tensor: zero whatever the values are, where 0 * inf would be NaN."""
    real = [t.real if t.is_complex() else t for t in tensors if t is not None]
    return torch.stack([t.reshape(-1)[:0].sum().double() for t in real]).sum()


def plain_gradients(
    results: Sequence[torch.Tensor | None], grads: _Optional, inputs: _Optional, needs: Sequence[bool]
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
