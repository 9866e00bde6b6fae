"""What a rank contributes to the scan, as one flat message: decayed sums, then the log decay that applies to them.

S, z and the mass of a `LinearState` all obey x = exp(a_later) x_earlier + x_later, so a message is a row of such sums
with their common log decay a behind it, and can be cut anywhere among the sums. The identity is a row of zeros.
"""

import torch
import torch.nn.functional as F

from dist_attn.ops import LinearState

__all__ = ["combine", "join_pieces", "pack", "split_pieces", "unpack"]

WEIGHTS = 1  # columns behind the sums that say what becomes of earlier sums: the log decay


def pack(state: LinearState) -> torch.Tensor:
    """One row per batch element and head.

    Shapes: -> [B, H, X], X = M V + M + 2.
    """
    return torch.cat(
        [state.s_BHMV.flatten(2), state.z_BHM, state.mass_BH[..., None], state.log_decay_BH[..., None]], dim=-1
    )


def unpack(packed_BHX: torch.Tensor, like: LinearState) -> LinearState:
    """The state in a message, with the sizes of `like`."""
    features, values = like.s_BHMV.shape[2:]
    s_BHN, z_BHM, mass_BH1, log_decay_BH1 = packed_BHX.split((features * values, features, 1, 1), dim=-1)
    return LinearState(
        s_BHN.unflatten(-1, (features, values)),
        z_BHM,
        mass_BH1[..., 0],
        log_decay_BH1[..., 0],
        torch.zeros_like(like.reset_BH),
    )


def combine(earlier_BHX: torch.Tensor, later_BHX: torch.Tensor, *, added: int = 0) -> torch.Tensor:
    """`LinearState.combine` on messages; with zeros on either side the other one comes out, bit for bit.

    The last `added` columns, which no state has, are only added, as the log decay before them is.
    """
    sums = later_BHX.shape[-1] - WEIGHTS - added
    kept_BHN = earlier_BHX[..., :sums] * later_BHX[..., sums : sums + WEIGHTS].exp()
    return torch.cat([kept_BHN + later_BHX[..., :sums], earlier_BHX[..., sums:] + later_BHX[..., sums:]], dim=-1)


def split_pieces(packed_BHX: torch.Tensor, pieces: int) -> tuple[torch.Tensor, ...]:
    """Messages of equal size, each with a part of the sums and all of the weights, that can be combined by themselves.

    Shapes: [B, H, N + W] -> `pieces` times [B, H, ceil(N / pieces) + W]; zeros fill the last one.
    """
    sums_BHN, weights_BHW = packed_BHX[..., :-WEIGHTS], packed_BHX[..., -WEIGHTS:]
    width = -(-sums_BHN.shape[-1] // pieces)
    padded = F.pad(sums_BHN, (0, pieces * width - sums_BHN.shape[-1]))
    return tuple(torch.cat([part, weights_BHW], dim=-1) for part in padded.split(width, dim=-1))


def join_pieces(pieces: "tuple[torch.Tensor, ...] | list[torch.Tensor]", columns: int) -> torch.Tensor:
    """The message of `columns` columns that was split into these."""
    sums = torch.cat([piece[..., :-WEIGHTS] for piece in pieces], dim=-1)
    return torch.cat([sums[..., : columns - WEIGHTS], pieces[0][..., -WEIGHTS:]], dim=-1)
