"""A `LinearState` as a message of the scan: S, z and the mass, which decay alike, then their log decay."""

import torch

from dist_attn.ops import LinearState

__all__ = ["pack", "unpack"]


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
