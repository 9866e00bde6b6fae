"""The pre-norm block: x + mixer(LN(x)), x + MLP(LN(x)), LayerNorm over the features of each token.

Turner's printed normalisation runs over the sequence instead, which would leak the future into a causal model.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers import MixerConfig, MixerState, build_mixer
from dist_attn.ops import SequenceOps

__all__ = ["Block"]


class Block(nn.Module):
    """One layer of a model over any mixer.

    Reference: Introduction to Transformers, Sec. 3 (with per-token LayerNorm).
    """

    def __init__(self, mixer: MixerConfig, mlp_size: int) -> None:
        super().__init__()
        size = mixer.hidden_size
        self.mixer_norm = nn.LayerNorm(size)
        self.mixer = build_mixer(mixer)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp_in = nn.Linear(size, mlp_size)
        self.mlp_out = nn.Linear(mlp_size, size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, MixerState]:
        """The tokens after this layer and the mixer's state after the last global one."""
        mixed_BLD, after = self.mixer(self.mixer_norm(x_BLD), ops, state)
        return self._mlp(x_BLD + mixed_BLD), after

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, MixerState]:
        """`forward` for one token."""
        mixed_BD, after = self.mixer.step(self.mixer_norm(x_BD), state)
        return self._mlp(x_BD + mixed_BD), after

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return out
