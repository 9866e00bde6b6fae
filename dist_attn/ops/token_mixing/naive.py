"""The oracle of token mixing: the MLP of one channel of one sequence after the other."""

import math
from typing import Literal

import torch

__all__ = ["mix_tokens_naive"]


def mix_tokens_naive(
    x_BLD: torch.Tensor,
    w_in_LS: torch.Tensor,
    w_out_SL: torch.Tensor,
    *,
    bias_in_S: torch.Tensor | None = None,
    bias_out_L: torch.Tensor | None = None,
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh",
) -> torch.Tensor:
    """w_out^T act(w_in^T x + b_in) + b_out by definition; see `mix_tokens`."""
    y_BLD = torch.zeros_like(x_BLD)
    for b in range(x_BLD.shape[0]):
        for d in range(x_BLD.shape[2]):
            h_S = sum((w * x for w, x in zip(w_in_LS, x_BLD[b, :, d], strict=True)), start=torch.zeros_like(w_in_LS[0]))
            h_S = h_S if bias_in_S is None else h_S + bias_in_S
            if activation == "gelu_tanh":
                h_S = h_S * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h_S + 0.044715 * h_S**3))) / 2
            elif activation == "gelu":
                h_S = h_S * (1 + torch.erf(h_S / math.sqrt(2))) / 2
            else:
                h_S = h_S * (h_S > 0)
            y_L = sum((w * h for w, h in zip(w_out_SL, h_S, strict=True)), start=torch.zeros_like(w_out_SL[0]))
            y_BLD[b, :, d] = y_L if bias_out_L is None else y_L + bias_out_L
    return y_BLD
