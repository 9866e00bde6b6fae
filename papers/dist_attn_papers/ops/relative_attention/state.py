"""The state of causal relative attention: a kernel state, the values that left the window, the values still in it.

Beside it the division of the sums, which every form of relative attention shares.

Shape letters: B batch, H heads, L tokens, M or K features, V values, W = V + 1 (v and a ones column), T = k - 1 tokens
of a window, for relative positions clipped at k.
"""

from dataclasses import dataclass

import torch

from dist_attn.errors import ShapeError
from dist_attn.ops.device import without_autocast


@dataclass(frozen=True)
class WindowState:
    """Values (with a ones column) of a stretch of tokens, as seen from the token after it.

    Shapes:
        far_BHW     sum of the values more than k - 1 tokens back.
        near_BHTW   the last T = k - 1 values, oldest first; zeros where the stretch is shorter.

    `length` is the number of tokens in the stretch. Sums only ever grow: nothing is subtracted, because in float32 the
    difference of two running sums has lost all digits after a million tokens.
    """

    far_BHW: torch.Tensor
    near_BHTW: torch.Tensor
    length: int

    def combine(self, later: "WindowState") -> "WindowState":
        """The window after this stretch followed by `later`; associative, with an empty stretch as its unit."""
        width = self.near_BHTW.shape[2]
        kept = min(later.length, width)
        return WindowState(
            self.far_BHW + self.near_BHTW[:, :, :kept].sum(2) + later.far_BHW,
            torch.cat([self.near_BHTW[:, :, kept:], later.near_BHTW[:, :, width - kept :]], dim=2),
            self.length + later.length,
        )

    @staticmethod
    def of(v1_BHLW: torch.Tensor, width: int) -> "WindowState":
        """The window after these values and no others."""
        length = v1_BHLW.shape[2]
        kept = min(length, width)
        near = v1_BHLW[:, :, length - kept :]
        padding = near.new_zeros((*near.shape[:2], width - kept, near.shape[3]))
        return WindowState(v1_BHLW[:, :, : length - kept].sum(2), torch.cat([padding, near], dim=2), length)

    def emptied(self) -> "WindowState":
        """The window of no tokens, as wide as this one."""
        return WindowState(torch.zeros_like(self.far_BHW), torch.zeros_like(self.near_BHTW), 0)

    def pack(self) -> torch.Tensor:
        """A message, which does not hold the length: the far values and then the near ones, [B, H, 1 + T, W]."""
        return torch.cat([self.far_BHW[:, :, None], self.near_BHTW], dim=2)

    @staticmethod
    def unpack(rows_BHTW: torch.Tensor, length: int) -> "WindowState":
        """The window in a message, of a stretch of `length` tokens."""
        return WindowState(rows_BHTW[:, :, 0], rows_BHTW[:, :, 1:], length)


@dataclass(frozen=True)
class RelativeState:
    """The state of causal relative attention: sum of phi(k) [v, 1]^T, [B, H, M, W], and the window of values."""

    sz_BHMW: torch.Tensor
    window: WindowState

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the sums."""
        return self.sz_BHMW.dtype

    def check(self, batch: int, heads: int, features: int, values: int, width: int) -> None:
        """Raises: ShapeError unless this is the state of such keys and values, with a window of `width` values."""
        needed = [(batch, heads, size, values + 1) for size in (features, width)]
        shapes = [tuple(self.sz_BHMW.shape), tuple(self.window.near_BHTW.shape)]
        if shapes != needed:
            raise ShapeError(f"the state's sums and window have shapes {shapes}; these inputs need {needed}")

    def combine(self, later: "RelativeState") -> "RelativeState":
        """The state of this stretch followed by `later`."""
        return RelativeState(self.sz_BHMW + later.sz_BHMW, self.window.combine(later.window))

    @staticmethod
    def of(k_BHLK: torch.Tensor, v1_BHLW: torch.Tensor, width: int) -> "RelativeState":
        """The state of these keys and values alone, with a window of `width` values."""
        with without_autocast(k_BHLK.device):
            return RelativeState(k_BHLK.transpose(-1, -2) @ v1_BHLW, WindowState.of(v1_BHLW, width))

    def emptied(self) -> "RelativeState":
        """The state of no tokens, of the sizes of this one."""
        return RelativeState(torch.zeros_like(self.sz_BHMW), self.window.emptied())

    def pack(self) -> torch.Tensor:
        """A message: the kernel state and below it the window's, [B, H, M + 1 + T, W]."""
        return torch.cat([self.sz_BHMW, self.window.pack()], dim=2)

    def unpack(self, message_BHXW: torch.Tensor, length: int) -> "RelativeState":
        """The state in a message of states such as this one, of a stretch of `length` tokens."""
        features = self.sz_BHMW.shape[2]
        return RelativeState(message_BHXW[:, :, :features], WindowState.unpack(message_BHXW[:, :, features:], length))

    @staticmethod
    def identity(
        batch: int,
        heads: int,
        features: int,
        values: int,
        reach: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "RelativeState":
        """The state of no tokens, for positions clipped at `reach` = k."""
        empty = torch.zeros((batch, heads, 0, values + 1), dtype=dtype, device=device)
        window = WindowState.of(empty, max(reach - 1, 0))
        return RelativeState(torch.zeros((batch, heads, features, values + 1), dtype=dtype, device=device), window)


def normalised(num_BHLW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numerators over the row sums in their last column; 0, and no gradient, where a row has no weight at all."""
    den_BHL1 = num_BHLW[..., -1:]
    nothing_BHL1 = den_BHL1 == 0
    out_BHLV = num_BHLW[..., :-1] / den_BHL1.masked_fill(nothing_BHL1, 1.0)
    return out_BHLV.masked_fill(nothing_BHL1, 0.0).to(dtype)
