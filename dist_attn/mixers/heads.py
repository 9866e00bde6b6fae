"""What attention mixers share: an optional short convolution, the q, k, v projections, and heads."""

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import state_zeros
from dist_attn.ops import SequenceOps

__all__ = ["ShortConvolution", "merge_heads", "split_heads"]


class ShortConvolution(nn.Module):
    """A causal depthwise convolution that starts as the identity; it tells each token what stands just before it."""

    def __init__(self, hidden_size: int, taps: int) -> None:
        super().__init__()
        weight = torch.zeros(taps, hidden_size)
        weight[0] = 1.0
        self.weight_KD = nn.Parameter(weight)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, tail_BKD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolved tokens and the last K - 1 tokens of x."""
        return ops.convolve_streaming(x_BLD, self.weight_KD, tail_BKD)

    def step(self, x_BD: torch.Tensor, tail_BKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` for one token."""
        window_BKD = torch.cat([tail_BKD, x_BD[:, None]], dim=1)
        return (window_BKD * self.weight_KD.flip(0)).sum(dim=1), window_BKD[:, 1:]

    def initial_tail(self, batch: int) -> torch.Tensor:
        """No tokens yet: zeros."""
        taps, hidden_size = self.weight_KD.shape
        return state_zeros(self.weight_KD, (batch, taps - 1, hidden_size))


def split_heads(x_BLD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, L, H K] -> [B, H, L, K]."""
    x_BLHK: torch.Tensor = x_BLD.unflatten(-1, (num_heads, -1))
    return x_BLHK.transpose(1, 2)


def merge_heads(x_BHLK: torch.Tensor) -> torch.Tensor:
    """[B, H, L, K] -> [B, L, H K]."""
    return x_BHLK.transpose(1, 2).flatten(2)


def linear_float32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)` outside any autocast: a gate near 1 loses its digits in bf16 (1 - bf16(g) is 58 % off at logit 6)."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(layer.weight.dtype), layer.weight, layer.bias)
