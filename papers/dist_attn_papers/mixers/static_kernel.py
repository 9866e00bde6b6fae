"""Mixing by a static kernel of the tokens themselves, phi(X) phi(X)^T X: no projections, nothing learned."""

from typing import final

import torch

from dist_attn.feature_maps import ArcCosine, EluPlusOne, Gaussian
from dist_attn.mixers.base import MixerState, Paradigm, TokenMixer, WholeSequenceMixer
from dist_attn.mixers.heads import merge_heads, split_heads
from dist_attn.mixers.kernel_attention import KernelMixer, KernelState
from dist_attn.mixers.random_matrices import RandomMatrices
from dist_attn.ops import Denominator, FeatureMap, SequenceOps, linear_attention_step
from dist_attn_papers.mixers.static_kernel_config import StaticKernelConfig


class _Kernel(RandomMatrices):
    """phi, and how its sums are divided."""

    config: StaticKernelConfig
    nothing: torch.Tensor

    def __init__(self, config: StaticKernelConfig) -> None:
        super().__init__()
        self.config = config
        if config.feature != "elu":
            self.hold_matrices()
        estimated = config.feature == "gaussian"  # which may be negative, or small by chance
        weights = Denominator("floor", 0.3 if estimated else 1e-12)
        self.denominator = {"weights": weights, "length": Denominator("mass"), "none": Denominator("one")}[
            config.divisor
        ]
        # Where a module has no parameter, this says where it lies and in which precision.
        self.register_buffer("nothing", torch.zeros(0), persistent=False)

    def feature_map(self) -> FeatureMap:
        if self.config.feature == "elu":
            return EluPlusOne()
        w_HDK = self.config.sigma * self.matrices()
        return (Gaussian if self.config.feature == "gaussian" else ArcCosine)(w_HDK, unit_norm=True)


@final
class StaticKernel(WholeSequenceMixer):
    """Every token is the mean of all tokens by the kernel of their features.

    Reference: A Unified View of Long-Sequence Models, Sec. 4.3, Eq. 11.
    """

    paradigm = Paradigm.FIXED_DEPENDENT
    name = "a static kernel over all tokens"

    def __init__(self, config: StaticKernelConfig) -> None:
        super().__init__()
        self.config = config
        self.kernel = _Kernel(config)

    def mix(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        x_BHLK = split_heads(x_BLD, self.config.num_heads)
        phi, divisor = self.kernel.feature_map(), self.kernel.denominator
        out_BHLK, _ = ops.linear_attention(x_BHLK, x_BHLK, x_BHLK, feature_map=phi, causal=False, denominator=divisor)
        return merge_heads(out_BHLK)


@final
class CausalStaticKernel(KernelMixer):
    """Every token is the mean of the tokens so far by the kernel of their features; the state has constant size.

    Reference: A Unified View of Long-Sequence Models, Sec. 4.3, Eq. 11, with a mask.
    """

    config: StaticKernelConfig
    paradigm = Paradigm.FIXED_DEPENDENT

    def __init__(self, config: StaticKernelConfig) -> None:
        super().__init__()
        self.config = config
        self.kernel = _Kernel(config)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BLD.shape[0])
        x_BHLK = split_heads(x_BLD, self.config.num_heads)
        phi, divisor = self.kernel.feature_map(), self.kernel.denominator
        out_BHLK, after = ops.linear_attention(
            x_BHLK, x_BHLK, x_BHLK, feature_map=phi, causal=True, state=before.attention, denominator=divisor
        )
        return merge_heads(out_BHLK), KernelState(after, before.tail_BKD, before.kind)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BD.shape[0])
        x_BHK = x_BD.unflatten(-1, (self.config.num_heads, -1))
        phi, divisor = self.kernel.feature_map(), self.kernel.denominator
        out_BHK, after = linear_attention_step(
            x_BHK, x_BHK, x_BHK, before.attention, feature_map=phi, denominator=divisor
        )
        return out_BHK.flatten(1), KernelState(after, before.tail_BKD, before.kind)

    def initial_tail(self, batch: int) -> torch.Tensor:
        """There is no short convolution."""
        return self.kernel.nothing.new_zeros((batch, 0, self.config.hidden_size))


def static_kernel(config: StaticKernelConfig) -> TokenMixer:
    """The mixer over all keys, or over those so far."""
    return StaticKernel(config) if config.bidirectional else CausalStaticKernel(config)
