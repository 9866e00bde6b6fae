"""Modes of torch in which a row has the same bits whatever lies beside it: in whichever slot of a batch, however cut.

On a processor torch's elementwise loops take two vectors of numbers at a time, and what is left over at the end, of
[8, 6] some of the last rows, one by one by other formulas with other roundings. MKL's products of few outputs do the
same to inputs that fill no vector. `WholeVectors` fills them up, for decode steps.

A matrix product of 512 rows and one of 2,048 rows may round the same row differently. In blocks of one size, anchored
at the first token (`RowBlocks`), a row has the same bits wherever a sequence is cut between blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dist_attn.ops.linear_attention.attention import chunk_ranges

__all__ = ["RowBlocks", "WholeVectors"]

WHOLE_BYTES = 128
"""Two vectors of AVX-512; those of AVX2 are half as long."""
ALONE, SHARE = 16_384, 32_768
"""A loop over more numbers than ALONE may be cut for as many threads as there are, or for one for each SHARE; what is
left over at the cuts is like that at the end."""
FEW_OUTPUTS, INPUTS_AT_ONCE = 12, 4

_ELEMENTWISE = frozenset(
    {
        *(torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit),
        *(F.silu, F.softplus, F.gelu, F.mish, F.elu, F.selu),
        *(torch.exp2, torch.Tensor.exp2),
        *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__),
        *(torch.logaddexp, torch.Tensor.logaddexp),
    }
)
"""Those whose two formulas were seen to differ. `exp`, `tanh`, `erf` and `logsigmoid` have only one."""
_OF_HALVES = frozenset({torch.rsqrt, torch.Tensor.rsqrt})
"""Those that differ in half precision alone."""


class WholeVectors(TorchFunctionMode):
    """Within it nothing is left over: what would be is filled up first. `needed` says whether anything was.

    A model's steps call the same functions with the same shapes, so that one step tells whether the others need it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _leaves_inputs(*args[:2]):
            self.needed = True
            fill = (0, -args[0].shape[-1] % INPUTS_AT_ONCE)
            return func(F.pad(args[0], fill), F.pad(args[1], fill), *args[2:], **kwargs)
        if func not in _ELEMENTWISE and func not in _OF_HALVES:
            return func(*args, **kwargs)
        tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dim()]
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        whole = not tensors or (func in _OF_HALVES and tensors[0].element_size() > 2)
        if whole or not any(_leaves_over(x) for x in tensors if x.shape == shape):
            return func(*args, **kwargs)
        self.needed = True
        count = math.prod(shape)
        fill = (0, -count % (WHOLE_BYTES // tensors[0].element_size()))
        pieces = [F.pad(x.expand(shape).reshape(-1), fill, value=1.0).split(ALONE) for x in tensors]
        done = [func(*_with_tensors(args, some), **kwargs) for some in zip(*pieces, strict=True)]
        return torch.cat(done)[:count].view(shape)


def _with_tensors(args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The arguments with these in the places of their tensors, but for numbers without dimensions."""
    others = iter(tensors)
    return [next(others) if isinstance(x, torch.Tensor) and x.dim() else x for x in args]


def _leaves_inputs(x: torch.Tensor, w_OI: torch.Tensor) -> bool:
    few = w_OI.dtype == torch.float32 and w_OI.shape[0] < FEW_OUTPUTS
    return few and w_OI.device.type == "cpu" and bool(x.shape[-1] % INPUTS_AT_ONCE)


def _leaves_over(x: torch.Tensor) -> bool:
    """Return whether a loop over these numbers leaves some over at the end of some rows and not of others."""
    at_once = WHOLE_BYTES // x.element_size()
    if x.device.type != "cpu" or not x.is_floating_point() or x.numel() <= at_once // 2:
        return False
    threads, count = torch.get_num_threads() if x.numel() > ALONE else 1, x.numel()
    shares = [-(-count // number) for number in (threads, min(threads, -(-count // SHARE)))]
    if x.dim() > 1 and x[0].is_contiguous() and not x.is_contiguous():  # then each row has an end of its own
        return any(share % x[0].numel() % at_once for share in shares)
    return any(number % at_once for number in (count, *shares))


class RowBlocks(TorchFunctionMode):
    """Within it, `F.linear` of [..., L, D] takes chunks of tokens one after the other.

    For everything else a model does to tokens one by one (norms, activations, embeddings) a row's bits do not depend on
    the other rows anyway.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear or args[0].dim() < 2:
            return func(*args, **kwargs)
        x, *rest = args
        parts = [func(x[..., a:b, :].contiguous(), *rest, **kwargs) for a, b in chunk_ranges(x.shape[-2])]
        return torch.cat(parts, dim=-2) if parts else func(x, *rest, **kwargs)
