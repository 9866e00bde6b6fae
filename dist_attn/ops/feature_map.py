"""The interface of feature maps that attention ops need: a frozen value they can call and differentiate through.

The protocol lives here, below the maps themselves, so that ops never import `feature_maps`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

__all__ = ["FeatureMap", "FusedForm", "HasFusedForm"]


@runtime_checkable
class FeatureMap(Protocol):
    """phi: [B, H, L, K] -> [B, H, L, M], pointwise along the sequence.

    `tensors()` are the parameters gradients flow to; `with_tensors(*t)` is the same map over other
    values of them, which is how a fused backward pass re-creates the map on fresh leaves.
    """

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor: ...

    def tensors(self) -> tuple[torch.Tensor, ...]: ...

    def with_tensors(self, *tensors: torch.Tensor) -> "FeatureMap": ...


@dataclass(frozen=True)
class FusedForm:
    """A map in the words of GPU kernels that make features where they use them.

    gaussian, arc_cosine    of w x with the map's only tensor w [H, D, K], x divided by its length with `unit_norm`.
    elu                     elu(x) + 1, without tensors.
    """

    kind: Literal["gaussian", "arc_cosine", "elu"]
    unit_norm: bool = False


@runtime_checkable
class HasFusedForm(Protocol):
    """A feature map that kernels know."""

    def fused_form(self) -> FusedForm: ...
