"""Working on a device other than the CPU: precision kept, numbers sent without waiting, sums in a fixed order."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd import Function

__all__ = ["products_in", "running_sums", "send", "sum_rows", "take_rows", "without_autocast"]


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Operations keep the precision of their inputs inside it, whatever autocast stands around.

    Devices for which torch has no autocast, such as `meta`, refuse to be told so and need not be.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Kernels that multiply in one type may take this one, of two bytes, inside it, for wider tensors too."""
    if dtype not in (torch.bfloat16, torch.float16) or not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on another device, without waiting for what is queued there; one that is there, itself.

    The copy of an ordinary tensor to a GPU waits for all kernels before it. From pinned memory it takes its turn among
    them; torch keeps that memory until it is through.
    """
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def running_sums(x: torch.Tensor) -> torch.Tensor:
    """`cumsum` over the last dimension."""
    # Blocks of threads of a GPU share a lone row and add in the order in which they come; of two, each is one block's.
    return torch.stack([x, x]).cumsum(-1)[0] if x.numel() == x.shape[-1] else x.cumsum(-1)


def take_rows(x_NC: torch.Tensor, number_R: torch.Tensor) -> torch.Tensor:
    """The rows of these numbers, [N, C] -> [R, C]; gradients are added up in the order of the rows."""
    # Not index_select: its gradients are added atomically on GPUs, in an order that differs from run to run.
    return F.embedding(number_R, x_NC)


def sum_rows(x_RC: torch.Tensor, number_R: torch.Tensor, count: int) -> torch.Tensor:
    """The sums of the rows of each number, in their order: [R, C] -> [count, C]; the transpose of `take_rows`."""
    return cast(torch.Tensor, _Sums.apply(x_RC, number_R, count))  # type: ignore[no-untyped-call]


class _Sums(Function):
    """torch's own gradient of it cannot tell the size of no rows."""

    @staticmethod
    def forward(ctx: Any, x_RC: torch.Tensor, number_R: torch.Tensor, count: int) -> Any:
        ctx.save_for_backward(number_R)
        # The gradient of a table that is looked up: GPUs sort by number and add in order; index_add is atomic there.
        return torch.ops.aten.embedding_dense_backward(x_RC, number_R, count, -1, False)

    @staticmethod
    def backward(ctx: Any, grad_NC: torch.Tensor) -> Any:
        return take_rows(grad_NC, *ctx.saved_tensors), None, None
