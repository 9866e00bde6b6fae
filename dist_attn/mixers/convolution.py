"""Convolutions as token mixers: depthwise over a few tokens, causal or centred; SGConv over a whole sequence.

The kernel of SGConv is a row of small pieces, each twice as stretched as the last.

Letters: B batch, L tokens on this rank, D model width, K taps (of SGConv: of a piece), S scales, W sides.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer, require_own, state_zeros
from dist_attn.mixers.whole_sequence import WholeSequenceMixer
from dist_attn.model_config.mixers.convolutions import ConvolutionConfig, SgConvConfig
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
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

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
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        mixed: torch.Tensor = self.out(ops.convolve(x_BLD, self.weight_KD, centred=True))
        return mixed


def _filters(config: ConvolutionConfig) -> nn.Parameter:
    return nn.Parameter(torch.randn(config.taps, config.hidden_size) / config.taps**0.5)


def convolution(config: ConvolutionConfig) -> TokenMixer:
    """The convolution around each token, or over the last ones."""
    return CentredConvolution(config) if config.centred else CausalConvolution(config)


def stretched_kernel(pieces_SDK: torch.Tensor, decay_D: torch.Tensor, interpolation: str) -> torch.Tensor:
    """The pieces, stretched by 1, 1, 2, 4, … and weighted by decay^(S - 1 - i), one after the other.

    Shapes: pieces [S, D, K], decay [D] -> [K 2^(S - 1), D].
    Reference: A Unified View of Long-Sequence Models, Sec. 8.1 (with the lengths of the authors' code, whose sum is L).
    """
    scales = pieces_SDK.shape[0]
    parts = []
    for i, piece_DK in enumerate(pieces_SDK.unbind(0)):
        times = 2 ** max(0, i - 1)
        if times > 1:
            piece_DK = F.interpolate(piece_DK[None], scale_factor=times, mode=interpolation)[0]
        parts.append(piece_DK * decay_D[:, None] ** (scales - 1 - i))
    return torch.cat(parts, dim=1).T


@final
class StructuredConvolution(WholeSequenceMixer):
    """out(gelu(k * x + d x)): k has O(log L) parameters per feature; causal, or with a second kernel for the future.

    The kernel is divided by the norm that it has at first, so only ratios of its scales count.

    Reference: A Unified View of Long-Sequence Models, Sec. 8.1; Li et al. 2022 (SGConv).
    """

    paradigm = Paradigm.LEARNED_INDEPENDENT

    name = "a structured long convolution"
    norm_SD: torch.Tensor
    decay_D: torch.Tensor

    def __init__(self, config: SgConvConfig) -> None:
        super().__init__()
        self.config = config
        size, sides = config.hidden_size, 2 if config.bidirectional else 1
        scales = 1 + math.ceil(math.log2(max(1.0, config.length / config.piece)))
        decays = config.decay if isinstance(config.decay, tuple) else (config.decay, config.decay)
        self.pieces_WSDK = nn.Parameter(torch.randn(sides, scales, size, config.piece))
        self.skip_D = nn.Parameter(torch.randn(size))
        self.out = nn.Linear(size, size)
        self.register_buffer("decay_D", torch.linspace(*decays, size))
        with torch.no_grad():
            kernels = [self._stretched(side) for side in range(sides)]
        self.register_buffer("norm_SD", torch.stack([kernel.norm(dim=0) for kernel in kernels]))

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        # The tap on the token itself is the first one, and the skip beside it.
        kernel_LD, *ahead = (self.kernel(side) for side in range(self.pieces_WSDK.shape[0]))
        y_BLD = ops.long_convolve(x_BLD, kernel_LD, backward_kernel_LD=ahead[0] if ahead else None)
        mixed: torch.Tensor = self.out(F.gelu(y_BLD + self.skip_D * x_BLD))
        return mixed

    def kernel(self, side: int = 0) -> torch.Tensor:
        """The taps on the past (0) or on the future (1), [taps, D]."""
        return self._stretched(side) / self.norm_SD[side]

    def _stretched(self, side: int) -> torch.Tensor:
        return stretched_kernel(self.pieces_WSDK[side], self.decay_D, self.config.interpolation)
