"""FNet: the real part of the Fourier transform over tokens and features."""

from typing import final

import torch

from dist_attn.mixers.input_independent_config import FourierConfig
from dist_attn.mixers.paradigm import Paradigm
from dist_attn.mixers.whole_sequence import WholeSequenceMixer
from dist_attn.ops import SequenceOps

__all__ = ["FourierMixing"]


@final
class FourierMixing(WholeSequenceMixer):
    """Fixed mixing of every token with every other, for any length.

    Reference: A Unified View of Long-Sequence Models, Sec. 6.2; Lee-Thorp et al. 2021 (FNet).
    """

    paradigm = Paradigm.FIXED_INDEPENDENT

    name = "Fourier mixing"

    def __init__(self, config: FourierConfig) -> None:
        super().__init__()
        self.config = config

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        return ops.fourier_mix(x_BLD, norm=self.config.norm)
