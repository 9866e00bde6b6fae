"""The state of causal relative attention: a kernel state, the values that left the window, the values still in it.

Beside it what every form of relative attention shares: the checks of its inputs and the division of its sums.
"""

from dataclasses import dataclass

import torch

from dist_attn.errors import ShapeError

__all__ = ["RelativeState", "WindowState", "check_relative_shapes", "check_relative_state", "normalised"]


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


@dataclass(frozen=True)
class RelativeState:
    """What causal relative attention carries: sum of phi(k) [v, 1]^T, [B, H, M, W], and the window of values."""

    sz_BHMW: torch.Tensor
    window: WindowState

    def combine(self, later: "RelativeState") -> "RelativeState":
        """The state of this stretch followed by `later`."""
        return RelativeState(self.sz_BHMW + later.sz_BHMW, self.window.combine(later.window))

    @staticmethod
    def of(k_BHLK: torch.Tensor, v1_BHLW: torch.Tensor, width: int) -> "RelativeState":
        """The state of these keys and values alone, with a window of `width` values."""
        with torch.autocast(k_BHLK.device.type, enabled=False):
            return RelativeState(k_BHLK.transpose(-1, -2) @ v1_BHLW, WindowState.of(v1_BHLW, width))

    @staticmethod
    def identity(
        batch: int, heads: int, features: int, values: int, reach: int, *, dtype: torch.dtype = torch.float32
    ) -> "RelativeState":
        """The state of no tokens, for positions clipped at `reach` = k."""
        empty = torch.zeros((batch, heads, 0, values + 1), dtype=dtype)
        window = WindowState.of(empty, max(reach - 1, 0))
        return RelativeState(torch.zeros((batch, heads, features, values + 1), dtype=dtype), window)


def normalised(num_BHLW: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numerators over the row sums in their last column; 0, and no gradient, where a row has no weight at all."""
    den_BHL1 = num_BHLW[..., -1:]
    nothing_BHL1 = den_BHL1 == 0
    out_BHLV = num_BHLW[..., :-1] / den_BHL1.masked_fill(nothing_BHL1, 1.0)
    return out_BHLV.masked_fill(nothing_BHL1, 0.0).to(dtype)


def check_relative_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rp: torch.Tensor) -> None:
    """Raises ShapeError in words when the inputs of relative attention do not fit together."""
    if not (q.dim() == k.dim() == v.dim() == 4 and rp.dim() == 3):
        raise ShapeError(
            f"phi_q {tuple(q.shape)}, phi_k {tuple(k.shape)}, v {tuple(v.shape)}, phi_rp {tuple(rp.shape)}: needed are "
            "[B, H, L, K], [B, H, S, K], [B, H, S, V] and [H, R, K]"
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"phi_q {tuple(q.shape)}, phi_k {tuple(k.shape)}, v {tuple(v.shape)}: batch, heads and size must be equal, "
            "the length equal in phi_k and v"
        )
    if rp.shape[0] != q.shape[1] or rp.shape[2] != q.shape[3] or rp.shape[1] % 2 == 0:
        raise ShapeError(
            f"phi_rp has shape {tuple(rp.shape)}; needed is [{q.shape[1]}, R, {q.shape[3]}] with R = 2 k + 1 odd"
        )


def check_relative_state(state: RelativeState, k_BHLK: torch.Tensor, v1_BHLW: torch.Tensor, reach: int) -> None:
    """Raises ShapeError when the state is not one of these keys and values, with positions clipped at `reach`."""
    batch, heads, _, columns = v1_BHLW.shape
    wanted = [(batch, heads, size, columns) for size in (k_BHLK.shape[3], max(reach - 1, 0))]
    given = [tuple(state.sz_BHMW.shape), tuple(state.window.near_BHTW.shape)]
    if given != wanted:
        raise ShapeError(f"the state's sums and window have shapes {given}; these inputs need {wanted}")
