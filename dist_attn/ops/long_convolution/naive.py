"""The oracle of the long convolution: one shifted product per tap."""

import torch

__all__ = ["long_convolve_naive"]


def long_convolve_naive(
    x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
) -> torch.Tensor:
    """y_t = sum_j k_j x_{t-j} + sum_m k'_m x_{t+1+m} tap by tap, O(L^2); see `long_convolve`."""
    length = x_BLD.shape[1]
    y_BLD = torch.zeros_like(x_BLD)
    for j in range(min(length, kernel_LD.shape[0])):
        y_BLD[:, j:] = y_BLD[:, j:] + kernel_LD[j] * x_BLD[:, : length - j]
    if backward_kernel_LD is not None:
        for ahead in range(1, min(length, backward_kernel_LD.shape[0] + 1)):
            y_BLD[:, : length - ahead] = y_BLD[:, : length - ahead] + backward_kernel_LD[ahead - 1] * x_BLD[:, ahead:]
    return y_BLD
