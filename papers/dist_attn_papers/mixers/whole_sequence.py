"""Fixed and learned mixing of every token with every other: Fourier transforms, and an MLP along the sequence."""

import math
from typing import final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers import Paradigm, WholeSequenceMixer
from dist_attn.ops import SequenceOps
from dist_attn_papers.mixers.convolution_configs import FourierConfig, TokenMlpConfig
from dist_attn_papers.ops import fourier_mix, mix_tokens


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
        return fourier_mix(x_BLD, norm=self.config.norm, ops=ops)


@final
class TokenMlpMixer(WholeSequenceMixer):
    """W2 gelu(W1 x + b1) + b2 along the sequence, of one length; each rank uses the weights of its tokens.

    Reference: A Unified View of Long-Sequence Models, Eq. 12 to 14 (with the activation that they leave out);
    Tolstikhin et al. 2021 (MLP-Mixer).
    """

    paradigm = Paradigm.LEARNED_INDEPENDENT

    name = "token mixing"

    def __init__(self, config: TokenMlpConfig) -> None:
        super().__init__()
        self.config = config
        length, size = config.length, config.token_mlp_size
        self.token_in_LS = nn.Parameter(torch.randn(length, size) / math.sqrt(length))
        self.bias_in_S = nn.Parameter(torch.zeros(size))
        self.token_out_SL = nn.Parameter(torch.randn(size, length) / math.sqrt(size))
        self.bias_out_L = nn.Parameter(torch.zeros(length))

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        total = ops.total_length(x_BLD.shape[1])
        if total != self.config.length:
            raise InputError(
                f"the sequence has {total} tokens; token mixing has weights for exactly {self.config.length}: cut or "
                "pad the sequence, or take a mixer for any length"
            )
        weights, biases = (self.token_in_LS, self.token_out_SL), (self.bias_in_S, self.bias_out_L)
        return mix_tokens(x_BLD, *weights, bias_in_S=biases[0], bias_out_L=biases[1], ops=ops)
