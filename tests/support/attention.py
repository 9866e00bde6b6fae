"""Random inputs of linear attention, every optional part included or not, with all leaves requiring gradients."""

from dataclasses import dataclass

import torch

from dist_attn import feature_maps
from dist_attn.ops import FeatureMap, LinearState

BATCH, HEADS, SIZE, VALUES, RANDOM = 2, 3, 5, 4, 6


@dataclass
class Inputs:
    """One case; `sequence` are the tensors that are cut along dim 2, `replicated` the others."""

    sequence: dict[str, torch.Tensor]
    replicated: dict[str, torch.Tensor]

    @staticmethod
    def random(
        queries: int,
        keys: int,
        *,
        gate: bool,
        scale: bool,
        state: bool,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        sequence = {
            "q": normal(BATCH, HEADS, queries, SIZE),
            "k": normal(BATCH, HEADS, keys, SIZE),
            "v": normal(BATCH, HEADS, keys, VALUES),
        }
        if gate:
            sequence["log_gate"] = -normal(BATCH, HEADS, keys).abs()
        if scale:
            sequence["key_scale"] = normal(BATCH, HEADS, keys).sigmoid()
        replicated = {"w": normal(HEADS, RANDOM, SIZE)}
        if state:
            replicated |= {
                "s": normal(BATCH, HEADS, 2 * RANDOM, VALUES),
                "z": normal(BATCH, HEADS, 2 * RANDOM),
                "mass": normal(BATCH, HEADS).abs(),
                "log_decay": -normal(BATCH, HEADS).abs(),
            }
        return Inputs(sequence, replicated)

    def leaves(self, start: int = 0, stop: int | None = None) -> "Inputs":
        """The same values for tokens [start, stop) as fresh leaves that require gradients."""
        return Inputs(
            {name: t[:, :, start:stop].detach().clone().requires_grad_() for name, t in self.sequence.items()},
            {name: t.detach().clone().requires_grad_() for name, t in self.replicated.items()},
        )

    def arguments(self) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
        """Positional and keyword arguments of `linear_attention`."""
        state = None
        if "s" in self.replicated:
            r = self.replicated
            state = LinearState(
                r["s"], r["z"], r["mass"], r["log_decay"], torch.zeros_like(r["mass"], dtype=torch.bool)
            )
        feature_map: FeatureMap = feature_maps.Gaussian(self.replicated["w"], unit_norm=True)
        return (self.sequence["q"], self.sequence["k"], self.sequence["v"]), {
            "feature_map": feature_map,
            "log_gate_BHS": self.sequence.get("log_gate"),
            "key_scale_BHS": self.sequence.get("key_scale"),
            "state": state,
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of every leaf; zeros where none arrived."""
        leaves = {**self.sequence, **self.replicated}
        return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()}


def weighted_sum(*tensors: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """A scalar that every element enters with its own random weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in tensors]
    return sum(
        ((t * w).sum() for t, w in zip(tensors, weights, strict=True)), start=torch.zeros((), dtype=torch.float64)
    )
