"""What an attention op asks of a feature map: a frozen value it can call and differentiate through.

The protocol lives here, below the maps themselves, so that ops never import `feature_maps`.
"""

from typing import Protocol, runtime_checkable

import torch

__all__ = ["FeatureMap"]


@runtime_checkable
class FeatureMap(Protocol):
    """phi: [B, H, L, K] -> [B, H, L, M], pointwise along the sequence.

    `tensors()` are the parameters gradients flow to; `with_tensors(*t)` is the same map over other
    values of them, which is how a fused backward pass re-creates the map on fresh leaves.
    """

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor: ...

    def tensors(self) -> tuple[torch.Tensor, ...]: ...

    def with_tensors(self, *tensors: torch.Tensor) -> "FeatureMap": ...
