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
from dist_attn.ops.documents import DocumentPlaces


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
        places = ops.document_places(x_BLD.shape[1])
        return torch.where(self._place(places, x_BLD)[:, None], self.class_token_D.to(x_BLD.dtype), x_BLD)

    def forward(self, h_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, D] of the whole sequence.

        Cost: across ranks one all-reduce of B D elements.
        Raises: InputError for a sequence without tokens, or of several documents, on every rank.
        """
        vectors_BND = self.of_documents(h_BLD, ops)
        if vectors_BND.shape[1] != 1:
            raise InputError(
                f"{vectors_BND.shape[1]} packed documents were given to be one vector; there is one for each of them"
            )
        return vectors_BND[:, 0]

    def of_documents(self, h_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, N, D], a vector of each document packed into the sequence.

        Cost: across ranks one all-reduce of B N D elements.
        Raises: InputError for a document without tokens, on every rank.
        """
        places = ops.document_places(h_BLD.shape[1])
        if min(places.lengths_N, default=0) <= self.room:
            raise InputError("the sequence has no tokens; give at least one")
        if self.class_token_D is not None:
            # Masked, not picked: ranks without the place take part in the exchange, forward and backward.
            return ops.sum_over_documents(h_BLD * self._place(places, h_BLD)[:, None])
        lengths_N = torch.tensor(places.lengths_N, dtype=h_BLD.dtype, device=h_BLD.device)
        return ops.sum_over_documents(h_BLD) / lengths_N[:, None]

    def _place(self, places: DocumentPlaces, x_BLD: torch.Tensor) -> torch.Tensor:
        """Which of the L tokens here are class tokens, [L]."""
        lengths_N = torch.tensor(places.lengths_N)
        wanted_L = lengths_N[places.number_L] - 1 if self.causal else torch.zeros_like(places.position_L)
        return (places.position_L == wanted_L).to(x_BLD.device)
