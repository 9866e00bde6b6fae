"""The next token's cross entropy without the logits of all tokens."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["LOSS_PIECE", "token_loss"]

# Tokens whose logits exist at the same time.
LOSS_PIECE = 512


def token_loss(readout: Callable[[Tensor], Tensor], h_ND: Tensor, targets_N: Tensor) -> Tensor:
    """The sum of cross entropies in pieces that are recomputed backward: whole logits leave the cache: 2 x slower.

    Half-precision logits go through the softmax in float32; an autocast around the call holds in the recomputation.

    Shapes: h [N, D], targets [N] int64 -> scalar.
    """

    def piece(h_PD: Tensor, targets_P: Tensor) -> Tensor:
        logits_PV = readout(h_PD)
        wide = torch.promote_types(logits_PV.dtype, torch.float32)
        return F.cross_entropy(logits_PV.to(wide), targets_P, reduction="sum")

    pieces = zip(h_ND.split(LOSS_PIECE), targets_N.split(LOSS_PIECE), strict=True)
    losses = [checkpoint(piece, h, targets, use_reentrant=False) for h, targets in pieces]
    return torch.stack(losses).sum()
