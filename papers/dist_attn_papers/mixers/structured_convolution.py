"""SGConv: a convolution over a whole sequence, whose kernel is a row of pieces, each twice as stretched as the last.

Letters: B batch, L tokens on this rank, D model width, K taps of a piece, S scales, W sides.
"""

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers import Paradigm, WholeSequenceMixer
from dist_attn.ops import SequenceOps
from dist_attn_papers.mixers.convolution_configs import SgConvConfig
from dist_attn_papers.ops import long_convolve


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
        y_BLD = long_convolve(x_BLD, kernel_LD, backward_kernel_LD=ahead[0] if ahead else None, ops=ops)
        mixed: torch.Tensor = self.out(F.gelu(y_BLD + self.skip_D * x_BLD))
        return mixed

    def kernel(self, side: int = 0) -> torch.Tensor:
        """The taps on the past (0) or on the future (1), [taps, D]."""
        return self._stretched(side) / self.norm_SD[side]

    def _stretched(self, side: int) -> torch.Tensor:
        return stretched_kernel(self.pieces_WSDK[side], self.decay_D, self.config.interpolation)
