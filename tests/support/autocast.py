"""One step of training a mixer in float32 and under bf16 autocast, held against each other."""

import torch

from dist_attn.mixers import TokenMixer
from dist_attn.ops import LocalSequenceOps
from tests.support.closeness import TOLERANCES

__all__ = ["assert_trains_under_autocast"]

# Gradients may be small sums of large terms, or 0 but for rounding: each is also held against all of them together.
SHARE = 0.1


def assert_trains_under_autocast(mixer: TokenMixer, x_BLD: torch.Tensor) -> None:
    """Fail unless outputs and gradients under bf16 autocast are finite and, in norm, those of float32."""
    weights_BLD = torch.randn(x_BLD.shape, generator=torch.Generator().manual_seed(3))
    mixer, x_BLD = mixer.float(), x_BLD.float()

    def step(enabled: bool) -> dict[str, torch.Tensor]:
        mine = x_BLD.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, _ = mixer(mine, LocalSequenceOps())
        mixer.zero_grad()
        (y.float() * weights_BLD).sum().backward()
        gradients = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
        return {"output": y.detach().float(), "input": mine.grad, **gradients}

    want, got = step(False), step(True)
    assert got.keys() == want.keys()
    together = torch.stack([tensor.norm() for name, tensor in want.items() if name != "output"]).norm()
    for name, tensor in want.items():
        assert got[name].isfinite().all(), name
        scale = tensor.norm() + (0.0 if name in ("output", "input") else SHARE * together)
        share, _ = TOLERANCES[torch.bfloat16]["output" if name == "output" else "gradient"]
        error = float((got[name] - tensor).norm() / scale)
        assert error < share, f"{name}: {error}"
