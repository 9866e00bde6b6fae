"""Feature maps phi with phi(x).phi(y) ~ a kernel: random Fourier, arc-cosine, elu + 1, positive exponential.

| map | kernel it estimates (w ~ N(0, I)) | sign of phi | unbiased |
|---|---|---|---|
| gaussian | exp(-norm(x - y)^2 / 2) | any | yes; variance (1 - exp(-norm(x - y)^2))^2 / (2 D) |
| arc_cosine | norm(x) norm(y) (sin t + (pi - t) cos t) / (2 pi), t the angle | >= 0 | yes |
| elu_plus_one | none: a fixed positive map | > 0 | - |
| positive | exp(x.y) | > 0 | yes |

With w = sigma * w~ the Gaussian kernel is exp(-|sigma (x - y)|^2 / 2): sigma is an *inverse* temperature.
The paper's Theorem 1 prints the inverse; see docs/maths. For unit-norm x and y the norm factors of the
softmax kernel are constants and cancel in attention, which is why RFA normalises queries and keys.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops.feature_map import FusedForm

__all__ = [
    "ArcCosine",
    "EluPlusOne",
    "Gaussian",
    "Positive",
    "arc_cosine",
    "elu_plus_one",
    "gaussian",
    "positive",
    "project",
]


def project(x_BHLK: torch.Tensor, w_HDK: torch.Tensor) -> torch.Tensor:
    """The products w x, [B, H, L, D].

    Raises: ShapeError when they do not fit together.
    """
    if x_BHLK.dim() != 4 or w_HDK.dim() != 3:
        raise ShapeError(
            f"x has shape {tuple(x_BHLK.shape)} and w {tuple(w_HDK.shape)}; needed are x [B, H, L, K] and w [H, D, K]"
        )
    if x_BHLK.shape[1] != w_HDK.shape[0] or x_BHLK.shape[3] != w_HDK.shape[2]:
        raise ShapeError(
            f"x has {x_BHLK.shape[1]} heads of size {x_BHLK.shape[3]}, w has {w_HDK.shape[0]} heads of size "
            f"{w_HDK.shape[2]}; they must be equal"
        )
    w_HKD = w_HDK.to(x_BHLK.dtype).transpose(-1, -2)
    if x_BHLK.shape[2] == 1:
        # A decode step: one product per head. One per head and batch element would copy w for every element.
        return (x_BHLK[:, :, 0].transpose(0, 1) @ w_HKD).transpose(0, 1)[:, :, None]
    return x_BHLK @ w_HKD


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """Divide x by |x| along the last dimension; a zero vector stays zero."""
    length: torch.Tensor = x.norm(dim=-1, keepdim=True)
    # Not a floor under the length: its gradient at zero would be the floor's inverse, 1e38, and overflow a layer later.
    return x / length.masked_fill(length == 0, 1.0)


def gaussian(x_BHLK: torch.Tensor, w_HDK: torch.Tensor) -> torch.Tensor:
    """Random Fourier features D^-1/2 [sin(w_1 x) ... sin(w_D x), cos(w_1 x) ... cos(w_D x)].

    Shapes: x [B, H, L, K], w [H, D, K] (sigma already multiplied in) -> [B, H, L, 2 D].
    Reference: Random Feature Attention, Eq. 2.
    """
    projected = project(x_BHLK, w_HDK)
    scale = 1.0 / math.sqrt(w_HDK.shape[1])
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([projected.sin(), projected.cos()], dim=-1) * scale
    # Without a graph the two halves are written in place: the block stays in cache.
    num_random = w_HDK.shape[1]
    phi = projected.new_empty((*projected.shape[:-1], 2 * num_random))
    torch.sin(projected, out=phi[..., :num_random])
    torch.cos(projected, out=phi[..., num_random:])
    return phi.mul_(scale)


def arc_cosine(x_BHLK: torch.Tensor, w_HDK: torch.Tensor) -> torch.Tensor:
    """Arc-cosine features of order 1, D^-1/2 relu(w x).

    Shapes: x [B, H, L, K], w [H, D, K] -> [B, H, L, D].
    Reference: Random Feature Attention, Eq. 9.
    """
    return F.relu(project(x_BHLK, w_HDK)) * (1.0 / math.sqrt(w_HDK.shape[1]))


def elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1, element by element; strictly positive until it underflows.

    Reference: Scaleformer, Sec. 2.2 (after Katharopoulos et al. 2020).
    """
    return F.elu(x) + 1.0


def positive(x_BHLK: torch.Tensor, w_HDK: torch.Tensor) -> torch.Tensor:
    """Performer's positive features D^-1/2 exp(w x - |x|^2 / 2), an unbiased estimate of exp(x.y).

    No maximum is subtracted: a maximum over the sequence would look into the future and differ per shard.
    Shapes: x [B, H, L, K], w [H, D, K] -> [B, H, L, D].
    """
    exponent = project(x_BHLK, w_HDK) - 0.5 * x_BHLK.square().sum(dim=-1, keepdim=True)
    return exponent.exp() * (1.0 / math.sqrt(w_HDK.shape[1]))


@dataclass(frozen=True, eq=False)
class _Projected:
    """The common part of feature maps over projections."""

    w_HDK: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.w_HDK,)

    def with_tensors(self, *tensors: torch.Tensor) -> Self:
        (w_HDK,) = tensors
        return replace(self, w_HDK=w_HDK)


@dataclass(frozen=True, eq=False)
class Gaussian(_Projected):
    """`gaussian` as a frozen callable; `unit_norm` first normalises x per head, as RFA does."""

    unit_norm: bool = False

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        return gaussian(unit_norm(x_BHLK) if self.unit_norm else x_BHLK, self.w_HDK)

    def fused_form(self) -> FusedForm:
        """The description by which GPU kernels make these features."""
        return FusedForm("gaussian", self.unit_norm)


@dataclass(frozen=True, eq=False)
class ArcCosine(_Projected):
    """`arc_cosine` as a frozen callable; `unit_norm` first normalises x per head."""

    unit_norm: bool = False

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        return arc_cosine(unit_norm(x_BHLK) if self.unit_norm else x_BHLK, self.w_HDK)

    def fused_form(self) -> FusedForm:
        """The description by which GPU kernels make these features."""
        return FusedForm("arc_cosine", self.unit_norm)


@dataclass(frozen=True, eq=False)
class Positive(_Projected):
    """`positive` as a frozen callable; `unit_norm` first normalises x per head."""

    unit_norm: bool = False

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        return positive(unit_norm(x_BHLK) if self.unit_norm else x_BHLK, self.w_HDK)


@dataclass(frozen=True, eq=False)
class EluPlusOne:
    """`elu_plus_one` as a frozen callable."""

    def __call__(self, x_BHLK: torch.Tensor) -> torch.Tensor:
        return elu_plus_one(x_BHLK)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return ()

    def with_tensors(self, *tensors: torch.Tensor) -> "EluPlusOne":
        return self

    def fused_form(self) -> FusedForm:
        """The description by which GPU kernels make these features."""
        return FusedForm("elu")
