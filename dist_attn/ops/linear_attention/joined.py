"""Outputs of parts of a sequence as one tensor: without a copy where each part was written to its place in it."""

from typing import Any

import torch

__all__ = ["JoinedOutput"]


class JoinedOutput:
    """Room for outputs [B, H, L, V] that are computed part by part.

    An implementation may write a part into the room that it is given; what it returns counts, wherever it lies.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        # Memory of a CPU that nobody writes to costs nothing; elsewhere no implementation writes in place.
        self._whole = torch.empty(shape, dtype=dtype, device=device) if device.type == "cpu" else None
        self._parts: list[torch.Tensor] = []

    def room(self, start: int, stop: int) -> torch.Tensor | None:
        """Where tokens [start, stop) may be written to."""
        return None if self._whole is None else self._whole[:, :, start:stop]

    def add(self, part_BHTV: torch.Tensor) -> None:
        """The outputs of the next tokens."""
        self._parts.append(part_BHTV)

    def join(self) -> torch.Tensor:
        """All of them, [B, H, L, V]."""
        if len(self._parts) == 1:
            return self._parts[0]
        whole, at = self._whole, 0
        if whole is None:
            return torch.cat(self._parts, dim=2)
        for part in self._parts:
            place = whole[:, :, at : at + part.shape[2]]
            if part.numel() and (part.data_ptr() != place.data_ptr() or part.dtype != whole.dtype):
                return torch.cat(self._parts, dim=2)
            at += part.shape[2]
        joined: torch.Tensor = _Joined.apply(whole, *self._parts)  # type: ignore[no-untyped-call]
        return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.tokens = [part.shape[2] for part in parts]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *grads[0].split(ctx.tokens, dim=2))
