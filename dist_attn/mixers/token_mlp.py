"""MLP-Mixer's token mixing: an MLP over the tokens, the same for each feature."""

import math
from typing import final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.input_independent_config import TokenMlpConfig
from dist_attn.mixers.paradigm import Paradigm
from dist_attn.mixers.whole_sequence import WholeSequenceMixer
from dist_attn.ops import SequenceOps

__all__ = ["TokenMlp"]


@final
class TokenMlp(WholeSequenceMixer):
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
        return ops.mix_tokens(
            x_BLD, self.token_in_LS, self.token_out_SL, bias_in_S=self.bias_in_S, bias_out_L=self.bias_out_L
        )
