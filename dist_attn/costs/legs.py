"""What the LegS memory costs.

D model size, N coefficients of a channel, T tokens of a chunk.
"""

from dataclasses import dataclass

from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.input_independent import EqualState
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.mixers import FLOAT_BYTES

__all__ = ["LegsMemory"]

LEGS_CHUNK_TOKENS = 32
BLOCK_CHUNKS, BLOCK_WEIGHTS, BLOCK_COEFFICIENTS = 16, 1 << 19, 1 << 22  # of the chunked form
DOUBLE_BYTES = 8


@dataclass(frozen=True)
class LegsMemory(EqualState):
    """`hippo`: N coefficients in float64 for every channel, whatever the length."""

    hidden_size: int
    coefficients: int

    @property
    def parameters(self) -> int:
        """A read-out of N numbers and a skip per channel, the gated output's 2 D^2 and its bias 2 D."""
        size = self.hidden_size
        return size * self.coefficients + size + 2 * size**2 + 2 * size

    @property
    def linear(self) -> LinearWeights:
        """The gated output's 2 D^2."""
        return LinearWeights(2 * self.hidden_size**2, 2 * self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """8 B D N, and the tokens seen."""
        return DOUBLE_BYTES * batch * (self.hidden_size * self.coefficients + 1)

    def carry_bytes(self, batch: int = 1) -> int:
        """8 B (D + 1) N: a silent channel tells what the rank's tokens make others forget."""
        return DOUBLE_BYTES * batch * (self.hidden_size + 1) * self.coefficients

    def halo_bytes(self, batch: int = 1) -> int:
        """None: there is no short convolution."""
        return 0

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The chunked form; with several ranks each walks its tokens a second time, for the state it sends.

        The matrices of a chunk are the same for all channels and sequences that began together, and are counted once.
        """
        walks, n, chunk = 1 if ranks == 1 else 2, self.coefficients, LEGS_CHUNK_TOKENS
        making = 2.0 * n**2 * (chunk - 1) * (n + chunk / 2) / chunk
        passing = 2.0 * self.hidden_size * n * (n + chunk) / chunk
        reading = 2.0 * self.hidden_size * n * (n + chunk)
        return TokenFlops(projections=4.0 * self.hidden_size**2, state=walks * (making + passing) + reading)

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """A product with a full matrix and one read-out: the same at every position."""
        n = self.coefficients
        return TokenFlops(projections=4.0 * self.hidden_size**2, state=2.0 * self.hidden_size * n * (n + 1))

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About six tensors of [B, L, D]; or four, the matrices of some chunks, and the coefficients of one."""
        size, n, chunk = self.hidden_size, self.coefficients, LEGS_CHUNK_TOKENS
        weights, read = chunk * n * (n + chunk), batch * size * n * chunk
        chunks = min(BLOCK_CHUNKS, BLOCK_WEIGHTS // weights, BLOCK_COEFFICIENTS // read, tokens // chunk)
        block = max(1, chunks) * (2 * DOUBLE_BYTES + FLOAT_BYTES) * weights + 2 * FLOAT_BYTES * read
        each = FLOAT_BYTES * batch * tokens * size
        return max(6 * each, 4 * each + block)
