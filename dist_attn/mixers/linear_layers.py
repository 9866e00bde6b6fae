"""Linear layers that choose the fastest product for their number of rows.

Shape letters: B sequences, I inputs, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.ops.onednn import onednn_linear, takes_onednn_linear
from dist_attn.ops.step_products import step_products, takes_step_products

STEP_ROWS = 16
"""For 32 rows torch takes 0.8 of the time with weights that lie in cache, 1.2 with others (EPYC, one thread)."""


class Linear(nn.Linear):
    """A linear layer that computes by `linear_layer`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]."""
        return linear_layer(x, self.weight, self.bias)


def linear_layer(x: torch.Tensor, w_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x w^T + bias, [..., I] -> [..., O]: [B, I] of few sequences as a decode step, [B, L, I] as a pass."""
    is_step = x.dim() == 2 and len(x) <= STEP_ROWS and not torch.is_autocast_enabled("cpu")
    if is_step and takes_step_products(x, w_OI):
        y_BO = step_products(x, w_OI)
        return y_BO if bias_O is None else y_BO + bias_O
    multiply = onednn_linear if takes_onednn_linear(x, w_OI) else F.linear
    return multiply(x, w_OI, bias_O)
