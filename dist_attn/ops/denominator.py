"""The denominator policy: how phi(q).z becomes a safe divisor. It is part of the function, not a detail.

A random-feature estimate of a positive sum may be zero or negative, so every path (naive, streamed,
sharded, step) must apply the same named policy to the same global quantity.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dist_attn.errors import ConfigError
from dist_attn.ops.watch import current_watch

__all__ = ["Denominator"]

_KINDS = ("floor", "exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one")


@dataclass(frozen=True)
class Denominator:
    """A frozen policy, saved with a model.

    floor       max(den, eps * mass), mass = the carried weight sum m_t = g_t m_{t-1} + key_scale_t.
                One-sided; scale-free in the gates, so RFA-Gate's factor (1 - g) still cancels.
    exact       den as it is (the papers' formula).
    clamp       max(den, eps).
    sign_clamp  den moved away from zero to magnitude eps, sign kept (0 counts as positive).
    abs_clamp   max(|den|, eps): the sign is lost, as in the code of Random Feature Attention's authors.
    mass        the carried weight sum in the place of den: means of phi(q).phi(k) v over keys.
    one         1 in the place of den: sums as they are.

    Where floor or mass meets mass 0 (no key seen yet) the output is 0.
    """

    kind: Literal["floor", "exact", "clamp", "sign_clamp", "abs_clamp", "mass", "one"] = "floor"
    eps: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"denominator kind {self.kind!r} is unknown; use one of {', '.join(_KINDS)}")
        if not (0.0 <= self.eps < float("inf")):
            raise ConfigError(f"denominator eps {self.eps!r} must be a finite number >= 0")

    def divide(self, num: torch.Tensor, den: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """num / policy(den); a `Watch` is told of the denominators that the policy replaced.

        Shapes: num [B, H, ..., V], den [B, H, ...], mass broadcastable to den.
        """
        divisor = self.guard(den, mass)
        self._tell_watch(den, divisor)
        return num / divisor[..., None]

    @property
    def is_watched(self) -> bool:
        """Return whether a `Watch` counts the denominators that this policy replaces: mass and one replace them all."""
        return current_watch() is not None and self.kind not in ("mass", "one")

    def tell_watch(self, den: torch.Tensor, mass: torch.Tensor) -> None:
        """Have a `Watch`, where there is one, count the denominators that the policy replaces."""
        if self.is_watched:
            self._tell_watch(den, self.guard(den, mass))

    def _tell_watch(self, den: torch.Tensor, divisor: torch.Tensor) -> None:
        watch = current_watch()
        if watch is not None and self.is_watched:
            # A denominator that is NaN is no guarded one: NaN - NaN > 0 is false.
            watch.count((divisor.detach() - den.detach()).abs() > 0)

    def guard(self, den: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """The divisor that the policy puts in the place of `den`."""
        if self.kind == "exact":
            return den
        if self.kind == "clamp":
            return den.clamp_min(self.eps)
        if self.kind == "sign_clamp":
            return torch.where(den < 0, den.clamp_max(-self.eps), den.clamp_min(self.eps))
        if self.kind == "abs_clamp":
            return den.abs().clamp_min(self.eps)
        if self.kind == "one":
            return torch.ones_like(den)
        floored = mass.expand_as(den) if self.kind == "mass" else torch.maximum(den, self.eps * mass)
        return torch.where(floored == 0, torch.ones_like(floored), floored)
