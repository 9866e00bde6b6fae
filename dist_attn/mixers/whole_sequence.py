"""Mixers that take a sequence whole: every token sees later ones too, so there is no state and no step."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NoReturn, final

import torch
from torch import nn

from dist_attn.errors import InputError
from dist_attn.mixers.base import FieldsState, MixerState, Paradigm, TokenMixer
from dist_attn.model_config.mixers.convolutions import FourierConfig, TokenMlpConfig
from dist_attn.ops import SequenceOps


@dataclass(frozen=True)
class NoState(FieldsState):
    """The empty state of a mixer that has seen the whole sequence: no later token could go on from it."""


class WholeSequenceMixer(TokenMixer):
    """A mixer without a state; a subclass gives `mix`, and says its `name` for errors."""

    name: str

    @abstractmethod
    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """The mixed tokens, [B, L, D] -> [B, L, D]."""

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, NoState]:
        if state is not None and not isinstance(state, NoState):
            raise InputError(f"a {type(state).__name__} was given to {self.name}, which takes no state")
        return self.mix(x_BLD, ops), NoState()

    def step(self, x_BD: torch.Tensor, state: MixerState) -> NoReturn:
        raise InputError(f"{self.name} sees the sequence whole and has no step; take a causal mixer to decode")

    def initial_state(self, batch: int) -> NoState:
        return NoState()


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
        return ops.mix_tokens(
            x_BLD, self.token_in_LS, self.token_out_SL, bias_in_S=self.bias_in_S, bias_out_L=self.bias_out_L
        )
