"""From the hidden states of a sequence to one vector: their mean, or that of a class token.

A class token is a token of the sequence, so it has a place in it before the sequence is cut over ranks: the last one
under a causal mixer, where only the last token has seen all others, and the first one otherwise. Whoever prepares the
input leaves that place open with `make_room`; the model fills it in, and reads it out again, on whichever rank it lies.
"""

from typing import Literal

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.ops import SequenceOps

__all__ = ["Pooling"]


class Pooling(nn.Module):
    """The vector of a whole sequence, equal on all ranks.

    Reference: Introduction to Transformers, Sec. 4 (class token, pooling; a mean in place of the printed sum).
    """

    def __init__(self, kind: Literal["mean", "class_token"], hidden_size: int, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal
        self.class_token_D = nn.Parameter(0.02 * torch.randn(hidden_size)) if kind == "class_token" else None

    @property
    def room(self) -> int:
        """Places that `make_room` adds to a sequence."""
        return 0 if self.class_token_D is None else 1

    def make_room(self, x_BT: torch.Tensor) -> torch.Tensor:
        """A whole sequence, [B, T] or [B, T, N], with zeros in the place of the class token, if there is one."""
        if self.class_token_D is None:
            return x_BT
        place = x_BT.new_zeros((x_BT.shape[0], 1, *x_BT.shape[2:]))
        return torch.cat([x_BT, place] if self.causal else [place, x_BT], dim=1)

    def fill(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """The embedded slice of a sequence with room, with the class token in its place, wherever that lies."""
        if self.class_token_D is None:
            return x_BLD
        return torch.where(self._place(x_BLD, ops)[:, None], self.class_token_D.to(x_BLD.dtype), x_BLD)

    def forward(self, h_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, D] of the whole sequence.

        Cost: across ranks one all-reduce of B D elements.
        Raises: InputError for a sequence without tokens, on every rank.
        """
        total = ops.total_length(h_BLD.shape[1])
        if total <= self.room:
            raise InputError("the sequence has no tokens; give at least one")
        if self.class_token_D is None:
            return ops.sum_over_sequence(h_BLD) / total
        # Masked, not picked: ranks without the place take part in the exchange, forward and backward.
        return ops.sum_over_sequence(h_BLD * self._place(h_BLD, ops)[:, None])

    def _place(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """Which of the L tokens here is the class token, [L]."""
        length = x_BLD.shape[1]
        place = ops.total_length(length) - 1 if self.causal else 0
        return (ops.positions(length) == place).to(x_BLD.device)
