"""Convolutions as token mixers: depthwise over a few tokens, causal or centred.

Letters: B batch, L tokens on this rank, D model width, K taps.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from dist_attn.mixers.base import (
    FieldsState,
    MixerState,
    Paradigm,
    TokenMixer,
    WholeSequenceMixer,
    require_own,
    state_zeros,
)
from dist_attn.mixers.linear_layers import Linear
from dist_attn.model_config.mixers.convolutions import ConvolutionConfig
from dist_attn.ops import SequenceOps


@dataclass(frozen=True)
class ConvolutionState(FieldsState):
    """The last K - 1 tokens."""

    tail_BKD: torch.Tensor


@final
class CausalConvolution(TokenMixer):
    """y_t = out(sum_j w_j x_{t-j}), one filter for each feature.

    Reference: A Unified View of Long-Sequence Models, Eq. 3.
    """

    paradigm = Paradigm.LEARNED_INDEPENDENT

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__()
        self.config = config
        self.weight_KD = _filters(config)
        self.out = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, ConvolutionState]:
        before = self._own(state, x_BLD.shape[0])
        y_BLD, tail_BKD = ops.convolve_streaming(x_BLD, self.weight_KD, before.tail_BKD)
        return self.out(y_BLD), ConvolutionState(tail_BKD)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, ConvolutionState]:
        before = self._own(state, x_BD.shape[0])
        window_BKD = torch.cat([before.tail_BKD, x_BD[:, None]], dim=1)
        y_BD = (window_BKD * self.weight_KD.flip(0)).sum(dim=1)
        return self.out(y_BD), ConvolutionState(window_BKD[:, 1:])

    def initial_state(self, batch: int) -> ConvolutionState:
        taps, size = self.weight_KD.shape
        return ConvolutionState(state_zeros(self.weight_KD, (batch, taps - 1, size)))

    def _own(self, state: MixerState | None, batch: int) -> ConvolutionState:
        if state is None:
            return self.initial_state(batch)
        shape = (batch, self.config.taps - 1, self.config.hidden_size)
        return require_own(state, ConvolutionState, self.config.kind, [shape])


@final
class CentredConvolution(WholeSequenceMixer):
    """A short convolution over as many tokens after each token as before it."""

    paradigm = Paradigm.LEARNED_INDEPENDENT

    name = "a centred convolution"

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__()
        self.config = config
        self.weight_KD = _filters(config)
        self.out = Linear(config.hidden_size, config.hidden_size)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        mixed: torch.Tensor = self.out(ops.convolve(x_BLD, self.weight_KD, centred=True))
        return mixed


def _filters(config: ConvolutionConfig) -> nn.Parameter:
    return nn.Parameter(torch.randn(config.taps, config.hidden_size) / config.taps**0.5)


def convolution(config: ConvolutionConfig) -> TokenMixer:
    """The convolution around each token, or over the last ones."""
    return CentredConvolution(config) if config.centred else CausalConvolution(config)
