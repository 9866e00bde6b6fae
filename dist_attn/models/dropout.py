"""Dropout that does not ask how a batch is cut: a function of seed, step, place in the model, row, token and feature.

Letters: B rows, L tokens on this rank, D model width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dist_attn.ops import SequenceOps
from dist_attn.ops.device import send

__all__ = ["Draw", "Dropout", "hashed", "use_dropout"]

# SplitMix64, whose 64-bit constants are written here as the signed numbers that torch knows.
GOLDEN_GAMMA, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def hashed(numbers: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """64 random bits for each number under these seeds, as int64 of the same shape.

    Reference: Steele et al. 2014, Fast Splittable Pseudorandom Number Generators (SplitMix64).
    """
    state = numbers.to(torch.int64)
    for seed in seeds:
        # A seed of any size as a signed 64-bit number.
        folded = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        state = _mixed(state ^ _mixed(torch.full((), folded, dtype=torch.int64, device=state.device)))
    return _mixed(state)


def shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right with zeros from the left, which torch does not do to signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = x + GOLDEN_GAMMA
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return x ^ shifted(x, 31)


@dataclass
class Draw:
    """The source of a micro-batch's dropout masks; `first_row` is the number of its first row in the whole batch."""

    rate: float
    seed: int
    step: int = 0
    first_row: int = 0


class Dropout(nn.Module):
    """Zero for a share of the numbers in training, the others scaled up; nothing until `use_dropout` switches it on.

    A packed document counts as a row of its own, and a token by its distance from the document's first one: so the
    masks are the same however rows are divided among ranks and micro-batches, and sequences cut.

    Reference: Srivastava et al. 2014; Vaswani et al. 2017, Sec. 5.4 (behind each sub-layer, and of embeddings).
    """

    draw: Draw | None = None
    place = 0

    def forward(self, x_BLD: torch.Tensor, ops: SequenceOps | None, row: int | None = None) -> torch.Tensor:
        """[B, L, D] -> [B, L, D]; a step of decoding has no `ops` and drops nothing.

        `row` numbers the first sequence where it is not the first of the micro-batch.
        """
        if self.draw is None or ops is None or not self.training:
            return x_BLD
        places, first = ops.document_places(x_BLD.shape[1]), self.draw.first_row if row is None else row
        number_L, position_L = (send(x_L, x_BLD.device) for x_L in (places.number_L, places.position_L))
        rows_B1 = torch.arange(len(x_BLD), device=x_BLD.device)[:, None] * len(places.lengths_N)
        seeds = (self.draw.seed, self.draw.step, self.place)
        token_BL = hashed(hashed(first + rows_B1 + number_L, seeds) ^ position_L, ())
        feature_D = torch.arange(x_BLD.shape[2], device=x_BLD.device) * GOLDEN_GAMMA
        bits_BLD = _mixed(token_BL[..., None] + feature_D)
        kept_BLD = bits_BLD >= int(self.draw.rate * (1 << 64)) - (1 << 63)
        return torch.where(kept_BLD, x_BLD / (1.0 - self.draw.rate), 0.0)


def use_dropout(model: nn.Module, rate: float, seed: int) -> Draw:
    """Let the model drop this share in training, or nothing at rate 0; the training loop sets step and row."""
    draw = Draw(rate, seed)
    for place, module in enumerate(module for module in model.modules() if isinstance(module, Dropout)):
        module.draw, module.place = draw if rate else None, place
    return draw
