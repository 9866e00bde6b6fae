"""What causal mixers cost whose pattern does not depend on the tokens: a convolution, a diagonal state space.

Letters are the glossary's: D model size, K taps, N conjugate pairs of a channel's state, C tokens of a chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dist_attn.costs.exchanges import all_gather_bytes
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.mixers import CHUNK_TOKENS, FLOAT_BYTES
from dist_attn.costs.scans import ScanMessage

__all__ = ["CausalConvolution", "DiagonalStateSpace", "EqualState"]

STATE_BLOCK_CHUNKS = 8  # that the chunked recurrence works on at once


class EqualState(ABC):
    """What is common to mixers whose whole state is on every rank."""

    @abstractmethod
    def carry_bytes(self, batch: int = 1) -> int:
        """The state message that a rank contributes."""

    @abstractmethod
    def halo_bytes(self, batch: int = 1) -> int:
        """The edge tokens that a rank contributes."""

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "a state" if self.carry_bytes() else "edge tokens"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """(P - 1) of its messages: states and edge tokens are all-gathered."""
        return all_gather_bytes(self.carry_bytes(batch) + self.halo_bytes(batch), len(lengths))

    @property
    def buffers(self) -> int:
        """None."""
        return 0

    def kept_tokens(self, position: int, ranks: int) -> int:
        """All: every rank holds the one state."""
        return position

    def scan_message(self, batch: int = 1) -> ScanMessage | None:
        """None: what travels is all-gathered, whatever the exchange."""
        return None

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """Nothing: there are no keys."""
        return 0

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class CausalConvolution(EqualState):
    """`convolution`: K taps for every channel, which are no matrix product and so not counted as operations."""

    hidden_size: int
    taps: int

    @property
    def parameters(self) -> int:
        """Taps K D, the output's D^2 and its bias D."""
        return self.taps * self.hidden_size + self.hidden_size**2 + self.hidden_size

    @property
    def linear(self) -> LinearWeights:
        """The output's D^2."""
        return LinearWeights(self.hidden_size**2, self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The last K - 1 tokens."""
        return self.halo_bytes(batch)

    def carry_bytes(self, batch: int = 1) -> int:
        """There is no state to carry but the edge tokens."""
        return 0

    def halo_bytes(self, batch: int = 1) -> int:
        """4 B (K - 1) D."""
        return FLOAT_BYTES * batch * (self.taps - 1) * self.hidden_size

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The output's projection."""
        return TokenFlops(projections=2.0 * self.hidden_size**2)

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """The same."""
        return self.prefill_flops()

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About seven tensors of [B, L, D], and the tokens before them."""
        return FLOAT_BYTES * batch * self.hidden_size * (7 * tokens + 2 * self.taps)


@dataclass(frozen=True)
class DiagonalStateSpace(EqualState):
    """`s4d` as a scan: a state of N complex numbers for every channel, whatever the length."""

    hidden_size: int
    modes: int

    @property
    def parameters(self) -> int:
        """A step and a skip per channel, four numbers per pair, the gated output's 2 D^2 and its bias 2 D."""
        size = self.hidden_size
        return 2 * size + 4 * size * self.modes + 2 * size**2 + 2 * size

    @property
    def buffers(self) -> int:
        """The fixed inputs, one for each pair."""
        return self.modes

    @property
    def linear(self) -> LinearWeights:
        """The gated output's 2 D^2."""
        return LinearWeights(2 * self.hidden_size**2, 2 * self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """8 B D N."""
        return self.carry_bytes(batch)

    def carry_bytes(self, batch: int = 1) -> int:
        """8 B D N."""
        return 2 * FLOAT_BYTES * batch * self.hidden_size * self.modes

    def halo_bytes(self, batch: int = 1) -> int:
        """None: there is no short convolution."""
        return 0

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The chunked form; with several ranks each reads its inputs a second time, for the state it sends."""
        passes = 2 if ranks == 1 else 3
        return TokenFlops(
            projections=4.0 * self.hidden_size**2,
            scores=1.0 * self.hidden_size * CHUNK_TOKENS,
            state=passes * 4.0 * self.hidden_size * self.modes,
        )

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """One update and one read-out of the state: the same at every position."""
        parts = self.prefill_flops()
        return TokenFlops(projections=parts.projections, state=parts.state)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About six tensors of [B, L, D]; or four, with powers of every pair for a chunk and states of a block."""
        numbers = 2 * self.hidden_size * self.modes
        chunks = min(STATE_BLOCK_CHUNKS, -(-tokens // CHUNK_TOKENS))
        block = numbers * (7 * CHUNK_TOKENS + 3 * batch * chunks) + self.hidden_size * CHUNK_TOKENS**2
        each = batch * tokens * self.hidden_size
        return FLOAT_BYTES * max(6 * each + numbers, 4 * each + block)
