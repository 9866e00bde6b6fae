"""Position encodings of token embeddings: sinusoids, added or concatenated, and learned vectors."""

import math
from typing import cast

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.model_config.language_model import LearnedPositions, TokenPositions


def position_layers(kind: TokenPositions, size: int) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """The table of learned positions, and the map from a token beside its sinusoids to one vector, where needed."""
    return (
        nn.Embedding(kind.length, size) if isinstance(kind, LearnedPositions) else None,
        nn.Linear(2 * size, size) if kind == "concatenated" else None,
    )


def with_positions(
    x: torch.Tensor,
    positions: torch.Tensor,
    end_B: torch.Tensor,
    kind: TokenPositions,
    layers: tuple[nn.Embedding | None, nn.Linear | None],
) -> torch.Tensor:
    """Tokens [..., D] at their positions; `end_B` is where all ranks' tokens end, `layers` are `position_layers`.

    Raises: InputError for more tokens than there are learned positions, unless they repeat; on every rank or on none.
    Reference: Introduction to Transformers, Sec. 4 (added, and concatenated before a linear map).
    """
    if kind == "none":
        return x
    embedding, position_map = layers
    if not isinstance(kind, LearnedPositions):
        waves = sinusoidal(positions, x.shape[-1]).to(x.dtype)
        if position_map is None:
            return x + waves
        return cast(torch.Tensor, position_map(torch.cat([x, waves.expand_as(x)], dim=-1)))
    # Every rank compares the same end, so that all of them refuse or none.
    if kind.beyond == "refuse" and not torch.compiler.is_compiling() and int(end_B.max()) > kind.length:
        raise InputError(
            f"the text reaches {int(end_B.max())} tokens; this model has learned positions for {kind.length}: "
            "give a shorter text, or a model whose positions go on"
        )
    table = cast(nn.Embedding, embedding)
    return x + cast(torch.Tensor, table(positions % kind.length if kind.beyond == "repeat" else positions))


def sinusoidal(positions_L: torch.Tensor, size: int) -> torch.Tensor:
    """Fixed sinusoids, interleaved sin and cos, wave lengths from 2 pi to 10,000 * 2 pi.

    Shapes: positions [...] (integers) -> [..., size] float32, computed in float64 so that position 1,000,000 keeps
        its digits.
    Reference: Vaswani et al. 2017, Sec. 3.5.
    """
    half = (size + 1) // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64) * (-2.0 * math.log(10_000.0) / size))
    angles = positions_L.to(torch.float64)[..., None] * rates.to(positions_L.device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :size].float()
