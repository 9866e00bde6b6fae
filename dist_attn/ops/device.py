"""Working on a device other than the CPU: precision that is kept there, and numbers sent to it without waiting."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["products_in", "send", "without_autocast"]


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
