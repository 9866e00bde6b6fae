"""What causal kernel attention with relative positions (Scaleformer) costs: the same figures as every other mixer's.

Letters are the glossary's: D model size, H heads, K head size (M = K features), V value size (K by default), k reach
of the positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dist_attn.costs.exchanges import all_gather_bytes
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.mixers import BLOCK_GROUP_TOKENS, CHUNK_TOKENS, FLOAT_BYTES
from dist_attn.costs.operations import relative_state_numbers
from dist_attn.costs.scans import ScanMessage

__all__ = ["RelativeAttention"]


@dataclass(frozen=True)
class RelativeAttention:
    """`scaleformer`: per head a kernel state of K (V + 1) numbers and a window of max(k, 1) (V + 1), at any length."""

    hidden_size: int
    num_heads: int
    reach: int
    value_rank: int | None = None

    @property
    def head_size(self) -> int:
        """K."""
        return self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """V: K, unless the maps of values have another rank."""
        return self.head_size if self.value_rank is None else self.value_rank

    @property
    def values(self) -> int:
        """H V: numbers in the values of a token."""
        return self.num_heads * self.value_size

    @property
    def parameters(self) -> int:
        """Projections 2 D (D + H V) and k + 1 rows of positions."""
        return 2 * self.hidden_size * (self.hidden_size + self.values) + (self.reach + 1) * self.hidden_size

    @property
    def buffers(self) -> int:
        """None."""
        return 0

    @property
    def linear(self) -> LinearWeights:
        """Projections 2 D (D + H V), to 2 D + H V outputs and from H V to D."""
        size, values = self.hidden_size, self.values
        return LinearWeights(2 * size * (size + values), 3 * size + values)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """4 B H (K + max(k, 1)) (V + 1): all of it is also what ranks send each other."""
        return self.carry_bytes(batch)

    def kept_tokens(self, position: int, ranks: int) -> int:
        """All: every rank holds the one state."""
        return position

    def scan_message(self, batch: int = 1) -> ScanMessage | None:
        """None: these states travel by an all-gather, whatever the exchange."""
        return None

    def carry_bytes(self, batch: int = 1) -> int:
        """4 B H (K + max(k, 1)) (V + 1)."""
        numbers = relative_state_numbers(self.head_size, self.value_size, self.reach)
        return FLOAT_BYTES * batch * self.num_heads * numbers

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """Nothing: states travel instead."""
        return 0

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """None."""
        return 0

    def halo_bytes(self, batch: int = 1) -> int:
        """None: there is no short convolution."""
        return 0

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "a state"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """(P - 1) of its states."""
        return all_gather_bytes(self.carry_bytes(batch), len(lengths))

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The windowed form; with several ranks each reads its keys a second time, for the state it sends."""
        size, width = self.head_size, self.value_size + 1
        passes = 2 if ranks == 1 else 3
        return TokenFlops(
            projections=4.0 * self.hidden_size * (self.hidden_size + self.values),
            features=2.0 * self.num_heads * size * (self.reach + 1),
            scores=1.0 * self.num_heads * CHUNK_TOKENS * (size + width),
            state=2.0 * self.num_heads * width * (passes * size + max(1, self.reach)),
        )

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """One update and one read-out of the state, and the scores of all positions: the same for every token."""
        size, width = self.head_size, self.value_size + 1
        return TokenFlops(
            projections=4.0 * self.hidden_size * (self.hidden_size + self.values),
            features=2.0 * self.num_heads * size * (2 * self.reach + 1),
            state=2.0 * self.num_heads * width * (2 * size + max(1, self.reach)),
        )

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About twelve tensors of [B, L, D] around the attention; scores, windows and sums of one block."""
        groups = batch * self.num_heads
        chunks = max(1, min(8, BLOCK_GROUP_TOKENS // (CHUNK_TOKENS * groups)))
        width = self.value_size + 1
        scores = 5 * CHUNK_TOKENS + 2 * self.reach + 1
        block = (scores + 2 * width) * min(tokens, chunks * CHUNK_TOKENS)
        around = batch * tokens * (6 * self.hidden_size + 6 * max(self.values, self.hidden_size))
        sums = (2 + chunks) * max(width, self.head_size + 1) * width
        return FLOAT_BYTES * (around + groups * (block + sums))
