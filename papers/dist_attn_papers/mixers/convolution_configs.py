"""Mixers with the same pattern over the sequence for every input: long convolutions, Fourier transforms, token MLPs.

Letters: B batch, D model size, K taps, L tokens, S hidden numbers of a token MLP. A real Fourier transform of n numbers
is counted as 2.5 n log2 n operations, a complex one as twice that.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer


class WholeSequenceConfig(MixerConfig):
    """A mixer that takes a sequence whole and leaves no state."""

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return False

    @property
    def streams(self) -> bool:
        """Return False: there is no state to go on from."""
        return False

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """No bytes: a later token could not go on from them."""
        return 0


class SgConvConfig(WholeSequenceConfig):
    """A convolution as long as the sequence whose kernel is made of pieces at doubling scales."""

    kind: Literal["sgconv"]
    # The taps of one piece before it is stretched; the whole kernel has the first such length of at least `length`.
    piece: int = Field(default=64, ge=1)
    length: int = Field(ge=1)
    # Each coarser piece is smaller by 1 / decay; a range gives every channel its own.
    decay: float | tuple[float, float] = 2.0
    interpolation: Literal["linear", "nearest"] = "linear"
    bidirectional: bool = False

    @model_validator(mode="after")
    def _decays_are_positive(self) -> "SgConvConfig":
        decays = self.decay if isinstance(self.decay, tuple) else (self.decay,)
        if not all(0 < decay < math.inf for decay in decays):
            raise ValueError(f"decay {self.decay} must be above 0, and finite")
        return self

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return not self.bidirectional

    @property
    def sides(self) -> int:
        """The number of kernels: one for the past, and perhaps one for the future."""
        return 2 if self.bidirectional else 1

    @property
    def scales(self) -> int:
        """The number of pieces of a kernel."""
        return 1 + math.ceil(math.log2(max(1.0, self.length / self.piece)))

    def weights(self) -> Weights:
        """The weights of the pieces of all scales, a skip per channel, and the output."""
        pieces = self.sides * self.scales * self.hidden_size * self.piece
        fixed = self.hidden_size * (1 + self.sides)
        own = Weights(others=pieces + self.hidden_size, buffers=fixed)
        return linear(self.hidden_size, self.hidden_size, bias=True) + own

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of all tokens of some channels, and back."""
        return channels_and_back(self.hidden_size, batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the convolution, and two for each tap."""
        kernel = self.sides * self.hidden_size * 2.0
        return long_convolution_flops(self.hidden_size, tokens, kernel=kernel, projections=2.0 * self.hidden_size**2)


class FourierConfig(WholeSequenceConfig):
    """The real part of the Fourier transform over tokens and features; nothing is learned."""

    kind: Literal["fnet"]
    norm: Literal["ortho"] | None = None  # None: sums as they are, as in FNet's own code

    def weights(self) -> Weights:
        """No weights."""
        return Weights()

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of all tokens of some columns, complex numbers, and back; half of all are mirror images."""
        columns = self.hidden_size // 2 + 1
        complex_bytes = 2 * FLOAT_BYTES * batch
        return Traffic(columns=columns, columns_back=columns, column_bytes=complex_bytes, columns_are="columns")

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of a real transform over the features, and complex ones over the tokens."""
        features = 2.5 * self.hidden_size * math.log2(max(2, self.hidden_size))
        return TokenFlops(features=features, scores=5.0 * (self.hidden_size // 2 + 1) * math.log2(max(2, tokens)))


class TokenMlpConfig(WholeSequenceConfig):
    """An MLP over the tokens, the same for each feature; it takes sequences of one length."""

    kind: Literal["mlp_mixer"]
    length: int = Field(ge=1)
    token_mlp_size: int = Field(ge=1)

    @property
    def packs(self) -> bool:
        """Return False: it takes one unbroken sequence."""
        return False

    def weights(self) -> Weights:
        """The weights of two matrices L S, and their biases S + L."""
        return Weights(others=(2 * self.length + 1) * self.token_mlp_size + self.length)

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of an all-reduce of B S D numbers: the weighed sums, whatever the length."""
        return Traffic(reduced=batch * self.token_mlp_size * self.hidden_size)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of two products with S numbers of every channel."""
        return TokenFlops(scores=4.0 * self.hidden_size * self.token_mlp_size)


def channels_and_back(channels: int, batch: int) -> Traffic:
    """The traffic of all tokens of some channels, and back, as long convolutions need them."""
    return Traffic(columns=channels, columns_back=channels, column_bytes=FLOAT_BYTES * batch)


def long_convolution_flops(channels: int, tokens: int, *, kernel: float, projections: float) -> TokenFlops:
    """The operations of transforms of twice the length, of the channel, its kernel and back; and of the kernel."""
    transform = 2.5 * 2 * math.log2(2 * max(1, tokens))
    return TokenFlops(projections=projections, scores=3.0 * channels * transform, state=kernel)


register_mixer(SgConvConfig, "dist_attn_papers.mixers.structured_convolution:StructuredConvolution")
register_mixer(FourierConfig, "dist_attn_papers.mixers.whole_sequence:FourierMixing")
register_mixer(TokenMlpConfig, "dist_attn_papers.mixers.whole_sequence:TokenMlpMixer")
