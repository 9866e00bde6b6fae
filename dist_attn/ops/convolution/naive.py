"""The oracle of the short depthwise convolution: one product per token and tap."""

import torch

__all__ = ["convolve_naive"]


def convolve_naive(x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
    """y_t = sum_j w_j x_{t-j} by two loops; see `convolve`."""
    length, taps = x_BLD.shape[1], w_KD.shape[0]
    shift = taps // 2 if centred else 0
    y_BLD = torch.zeros_like(x_BLD)
    for t in range(length):
        for j in range(taps):
            if 0 <= t - j + shift < length:
                y_BLD[:, t] = y_BLD[:, t] + w_KD[j] * x_BLD[:, t - j + shift]
    return y_BLD
