"""What state spaces with full matrices cost: LSSL, and S4 as a scan.

D model size, N real numbers of a channel's state, M outputs of a channel, C tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Literal

from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.input_independent import EqualState
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.mixers import CHUNK_TOKENS, FLOAT_BYTES

__all__ = ["DenseStateSpace"]


@dataclass(frozen=True)
class DenseStateSpace(EqualState):
    """`lssl`, and `s4` as a scan: a state of N numbers for every channel, whatever the length.

    Powers of the matrices, N^3 log C per channel and call, are not counted as operations of a token.
    """

    kind: Literal["lssl", "s4"]
    hidden_size: int
    modes: int
    outputs: int = 1
    learned: bool = False

    @property
    def parameters(self) -> int:
        """lssl: a step, M N + M numbers per channel, the output's M D^2 + D, and A and B where they are learned.

        s4: a step and a skip per channel, ten numbers per pair, the gated output's 2 D^2 and its bias 2 D.
        """
        size, each = self.hidden_size, self.outputs
        if self.kind == "s4":
            return 2 * size + 4 * size * self.modes + 2 * size**2 + 2 * size
        return size + size * each * (self.modes + 1) + each * size**2 + size + self._matrix * self.learned

    @property
    def buffers(self) -> int:
        """A and B of LegS where they are fixed."""
        return 0 if self.kind == "s4" or self.learned else self._matrix

    @property
    def linear(self) -> LinearWeights:
        """lssl: the output's M D^2; s4: the gated output's 2 D^2."""
        size = self.hidden_size
        if self.kind == "s4":
            return LinearWeights(2 * size**2, 2 * size)
        return LinearWeights(self.outputs * size**2, size)

    @property
    def _matrix(self) -> int:
        return self.modes**2 + self.modes

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """4 B D N."""
        return self.carry_bytes(batch)

    def carry_bytes(self, batch: int = 1) -> int:
        """4 B D N."""
        return FLOAT_BYTES * batch * self.hidden_size * self.modes

    def halo_bytes(self, batch: int = 1) -> int:
        """None: there is no short convolution."""
        return 0

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The chunked form; with several ranks each reads its inputs a second time, for the state it sends."""
        walks = 1 if ranks == 1 else 2
        update = self.modes + self.modes**2 / CHUNK_TOKENS
        return TokenFlops(
            projections=2.0 * self.hidden_size**2 * (2 if self.kind == "s4" else self.outputs),
            scores=1.0 * self.hidden_size * self.outputs * CHUNK_TOKENS,
            state=2.0 * self.hidden_size * (walks * update + self.modes * self.outputs),
        )

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """One product with the matrix and one read-out: the same at every position."""
        parts = self.prefill_flops()
        return TokenFlops(
            projections=parts.projections,
            state=2.0 * self.hidden_size * self.modes * (self.modes + self.outputs),
        )

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """Five tensors of [B, L, D] and two of M outputs; or powers of every channel, and a chunk's Toeplitz matrix."""
        size, outputs, modes = self.hidden_size, self.outputs, self.modes
        powers = size * (4 * modes**2 + CHUNK_TOKENS * modes * (2 + 2 * outputs))
        toeplitz = size * outputs * CHUNK_TOKENS**2
        each = batch * tokens * size
        return FLOAT_BYTES * max((5 + 2 * outputs) * each, (3 + outputs) * each + powers + 2 * toeplitz)
