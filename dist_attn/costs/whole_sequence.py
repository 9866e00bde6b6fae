"""What mixers cost that take a sequence whole: long convolutions, transforms, token MLPs, attention over all keys.

Letters are the glossary's: B batch, L tokens, D model size, H heads, M features, V values per head, P ranks. A real
Fourier transform of n numbers is counted as 2.5 n log2 n operations, a complex one as twice that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from dist_attn.costs.exchanges import all_gather_bytes, all_reduce_bytes
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.input_independent import CausalConvolution
from dist_attn.costs.mixers import FLOAT_BYTES
from dist_attn.costs.operations import there_and_back_bytes

__all__ = ["CentredConvolution", "FourierMixing", "LongConvolution", "TokenMlp", "WholeSequence"]


class WholeSequence:
    """What is common to mixers that leave no state."""

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """None: a later token could not go on from it."""
        return 0


@dataclass(frozen=True)
class CentredConvolution(WholeSequence):
    """`convolution` with taps on both sides."""

    hidden_size: int
    taps: int

    @property
    def parameters(self) -> int:
        """Those of the causal one."""
        return CausalConvolution(self.hidden_size, self.taps).parameters

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The output's projection."""
        return CausalConvolution(self.hidden_size, self.taps).prefill_flops()

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "edge tokens"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """(P - 1) (K - 1) B D numbers: the edge tokens."""
        message = FLOAT_BYTES * batch * (self.taps - 1) * self.hidden_size
        return all_gather_bytes(message, len(lengths))


@dataclass(frozen=True)
class LongConvolution(WholeSequence):
    """`sgconv`, and `s4` and `s4d` as convolutions: one transform of every channel, and one of its kernel.

    `learned` numbers make the kernels of all channels, at `kernel_flops` for each tap of one channel on one side;
    `output` is the width that the projection behind has, in model sizes.
    """

    hidden_size: int
    learned: int
    kernel_flops: float
    sides: int
    output: int

    @property
    def parameters(self) -> int:
        """The kernels', a skip per channel, and the output's matrix and bias."""
        size = self.hidden_size
        return self.learned + size + self.output * (size**2 + size)

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "all tokens of some channels"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """All tokens of some channels, and back."""
        return there_and_back_bytes(lengths, self.hidden_size, FLOAT_BYTES * batch, rank)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Transforms of twice the length: of the channel, of its kernel and back; and the kernel itself."""
        transform = 2.5 * 2 * log2(2 * max(1, tokens))
        return TokenFlops(
            projections=2.0 * self.output * self.hidden_size**2,
            scores=3.0 * self.hidden_size * transform,
            state=self.sides * self.hidden_size * self.kernel_flops,
        )


@dataclass(frozen=True)
class FourierMixing(WholeSequence):
    """`fnet`: nothing is learned, and half the spectrum travels."""

    hidden_size: int

    @property
    def parameters(self) -> int:
        """None."""
        return 0

    @property
    def columns(self) -> int:
        """D // 2 + 1: the others are mirror images."""
        return self.hidden_size // 2 + 1

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "all tokens of some columns"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """All tokens of some columns, complex numbers, and back, where each brings the one that mirrors it."""
        return there_and_back_bytes(lengths, self.columns, 2 * FLOAT_BYTES * batch, rank)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """A real transform over the features, complex ones over the tokens."""
        features = 2.5 * self.hidden_size * log2(max(2, self.hidden_size))
        return TokenFlops(features=features, scores=5.0 * self.columns * log2(max(2, tokens)))


@dataclass(frozen=True)
class TokenMlp(WholeSequence):
    """`mlp_mixer`: an MLP of S hidden numbers over L tokens."""

    hidden_size: int
    length: int
    inner: int

    @property
    def parameters(self) -> int:
        """Two matrices L S, and their biases S + L."""
        return 2 * self.length * self.inner + self.inner + self.length

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "weighed sums of tokens"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """An all-reduce of B S D numbers: the weighed sums, whatever the length."""
        return all_reduce_bytes(batch * self.inner * self.hidden_size, FLOAT_BYTES, len(lengths))

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """Two products with S numbers of every channel."""
        return TokenFlops(scores=4.0 * self.hidden_size * self.inner)
