"""What each family of token mixers costs: numbers held, state, messages and operations of one layer.

Letters are the glossary's: B batch, L length, H heads, M features, V values per head, D model size, K taps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dist_attn.costs.calibration import default_exchange
from dist_attn.costs.exchanges import all_gather_bytes
from dist_attn.costs.flops import TokenFlops
from dist_attn.costs.linear_weights import LinearWeights
from dist_attn.costs.scans import ScanMessage, scan_cost

__all__ = [
    "CHUNK_TOKENS",
    "FLOAT_BYTES",
    "POSITION_BYTES",
    "KernelAttention",
    "LayerCosts",
    "MixerCosts",
    "SoftmaxAttention",
]

FLOAT_BYTES = 4
POSITION_BYTES = 8
CHUNK_TOKENS = 64  # of the blocked form of kernel attention
BLOCK_GROUP_TOKENS = 8 * 512  # tokens times heads times batch that it works on at once
TILE_QUERIES, TILE_KEYS, TILE_ELEMENTS = 256, 1024, 1 << 19  # of exact attention with relative positions


class LayerCosts(Protocol):
    """One layer's mixer of any kind. Bytes are those of float32 values."""

    @property
    def parameters(self) -> int:
        """Learned numbers."""
        ...

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Per token, on average over a sequence of `tokens`."""
        ...

    def state_bytes(self, position: int, batch: int = 1) -> int:
        """What a session keeps after `position` tokens."""
        ...

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        ...

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """What a rank sends, forward, for one sequence of which each rank has so many tokens."""
        ...


class MixerCosts(LayerCosts, Protocol):
    """One layer's mixer that goes on from a state, for plans of whole documents."""

    @property
    def buffers(self) -> int:
        """Fixed numbers that are saved with the parameters."""
        ...

    @property
    def linear(self) -> LinearWeights:
        """Of the parameters, those of linear layers."""
        ...

    def kept_tokens(self, position: int, ranks: int) -> int:
        """Of how many tokens a rank keeps its state after `position` of an encoding."""
        ...

    def scan_message(self, batch: int = 1) -> ScanMessage | None:
        """The state that the ranks scan by the exchange that is chosen; None where none travels, or by all-gather."""
        ...

    def carry_bytes(self, batch: int = 1) -> int:
        """The state message that a rank contributes to a block."""
        ...

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """What a rank sends to bring queries, keys and outputs together, over a document in even blocks."""
        ...

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """What that takes of a rank's memory."""
        ...

    def halo_bytes(self, batch: int = 1) -> int:
        """The edge tokens that a rank contributes to a block."""
        ...

    def decode_flops(self, position: int) -> TokenFlops:
        """Of the token at `position`."""
        ...

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """Peak of the temporary tensors while the layer mixes `tokens` of each sequence."""
        ...


@dataclass(frozen=True)
class KernelAttention:
    """All kinds with a state of M (V + 1) + 2 numbers per head, whatever the length: random and fixed features.

    `elu` and `efficient` have no random vectors: they are given none, and have as many features as a head has numbers.
    `efficient` walks twice, once for the means of its keys, with one feature and M values: M + 3 numbers more travel.
    """

    kind: Literal["rfa", "rfa_gate", "elu", "performer", "efficient", "static_kernel"]
    hidden_size: int
    num_heads: int
    num_random: int
    feature: Literal["gaussian", "arc_cosine", "elu_plus_one", "positive", "softmax"]
    taps: int
    projection_bias: bool = False
    rotary: bool = False
    shared_gate: bool = False
    key_weights: bool = False
    value_rank: int | None = None
    gated: bool = False  # beside kind `rfa_gate`, which always is

    @property
    def num_features(self) -> int:
        """M: a Gaussian feature map has a sine and a cosine for every random vector."""
        if self.feature in ("elu_plus_one", "softmax"):
            return self.head_size
        return self.num_random * (2 if self.feature == "gaussian" else 1)

    @property
    def num_gates(self) -> int:
        """One per head, one for all, or none."""
        if not self._has_gates:
            return 0
        return 1 if self.shared_gate else self.num_heads

    @property
    def head_size(self) -> int:
        """The size of a head's queries and keys."""
        return self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """V: as large, unless the maps of values have another rank."""
        return self.head_size if self.value_rank is None else self.value_rank

    @property
    def parameters(self) -> int:
        """Projections 2 D (D + H V), their biases 3 D + H V if any, taps K D, sigma D of `rfa`, D + 1 for each gate.

        A static kernel has none.
        """
        if self.kind == "static_kernel":
            return 0
        size, values = self.hidden_size, self.num_heads * self.value_size
        gate = self.num_gates * (size + 1)
        bias = 3 * size + values if self.projection_bias else 0
        sigma = size if self.kind in ("rfa", "rfa_gate") else 0
        return 2 * size * (size + values) + bias + self.taps * size + sigma + gate

    @property
    def buffers(self) -> int:
        """The random vectors, one set per head."""
        return self.num_random * self.hidden_size

    @property
    def linear(self) -> LinearWeights:
        """Projections 2 D (D + H V), to 2 D + H V outputs and from H V to D; a static kernel has none."""
        size, values = self.hidden_size, self.num_heads * self.value_size
        if self.kind == "static_kernel":
            return LinearWeights()
        return LinearWeights(2 * size * (size + values), 3 * size + values)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """S, z, mass and log decay per head, one flag per head, K - 1 tokens of the convolution, a rotary position.

        With key weights also their unit per head, in float64.
        """
        heads = self.num_heads * (FLOAT_BYTES * self._state_numbers + 1 + (8 if self.key_weights else 0))
        position_bytes = POSITION_BYTES if self.rotary else 0
        return batch * (heads + position_bytes + FLOAT_BYTES * max(0, self.taps - 1) * self.hidden_size)

    def kept_tokens(self, position: int, ranks: int) -> int:
        """All: every rank holds the one state."""
        return position

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """Nothing: states travel instead."""
        return 0

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """None."""
        return 0

    def scan_message(self, batch: int = 1) -> ScanMessage:
        """S, z and the mass of each head, and its log decay; two such messages of `efficient` are told as one."""
        return ScanMessage(batch * self.num_heads, self._state_numbers + self._mean_numbers - 1, FLOAT_BYTES)

    def carry_bytes(self, batch: int = 1) -> int:
        """4 B H (M (V + 1) + 2), of `efficient` 4 B H (M + 3) more."""
        return FLOAT_BYTES * batch * self.num_heads * (self._state_numbers + self._mean_numbers)

    def halo_bytes(self, batch: int = 1) -> int:
        """4 B (K - 1) D."""
        return FLOAT_BYTES * batch * max(0, self.taps - 1) * self.hidden_size

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "a state, edge tokens" if self.taps > 1 else "a state"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """The scan of states by the usual exchange, edge tokens, and 16 B H of a rank for the unit of key weights."""
        ranks = len(lengths)
        units = all_gather_bytes(16 * batch * self.num_heads, ranks) if self.key_weights else 0
        states = scan_cost(default_exchange(ranks), self.scan_message(batch), ranks, rank).bytes_sent
        return states + all_gather_bytes(self.halo_bytes(batch), ranks) + units

    def prefill_flops(self, tokens: int = 0, ranks: int = 1) -> TokenFlops:
        """The blocked form; with several ranks each reads its keys a second time, for the state it sends.

        The weights of positive features are found first, by the random vectors once more.
        """
        one_side = 2.0 * self.hidden_size * self.num_random
        one_pass = 2.0 * self.num_heads * (self.num_features * (self.value_size + 1) + max(0, self._mean_numbers - 2))
        passes = 2 if ranks == 1 else 3
        # Per head: C M for q k^T, C (V + 1) for the weighted sum; gates add C for the mass. Half of it is causal.
        per_head = self.num_features + self.value_size + 1 + (self._has_gates or self.key_weights)
        if self.kind == "efficient":
            per_head += self.num_features + 3
        return TokenFlops(
            projections=self._projections,
            features=(passes + (self.kind == "performer")) * one_side,
            scores=1.0 * self.num_heads * CHUNK_TOKENS * per_head,
            state=passes * one_pass,
        )

    def decode_flops(self, position: int = 0) -> TokenFlops:
        """One update and one read-out of the state: the same at every position."""
        parts = self.prefill_flops()
        return TokenFlops(projections=parts.projections, features=parts.features, state=parts.state)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """Eight tensors of [B, L, D] around attention, ten if rotary or efficient; features and scores of a block.

        Half of them are of values, which may be wider. A static kernel has no q, k and v.
        """
        groups = batch * self.num_heads
        chunks = max(1, min(8, BLOCK_GROUP_TOKENS // (CHUNK_TOKENS * groups)))
        width = self.value_size + 1
        per_token = 4 * self.num_features + 4 * CHUNK_TOKENS + 6 * width
        states = 3 * self.num_features * width * chunks
        block = groups * (per_token * min(tokens, chunks * CHUNK_TOKENS) + states)
        values = self.num_heads * self.value_size
        extra = 2 * (self.rotary + (self.kind == "efficient")) - 3 * (self.kind == "static_kernel")
        numbers = (4 + extra) * self.hidden_size + 4 * max(values, self.hidden_size)
        return FLOAT_BYTES * (batch * tokens * numbers + block)

    @property
    def _has_gates(self) -> bool:
        return self.gated or self.kind == "rfa_gate"

    @property
    def _state_numbers(self) -> int:
        return self.num_features * (self.value_size + 1) + 2

    @property
    def _mean_numbers(self) -> int:
        """Of the state of the keys' means."""
        return self.num_features + 3 if self.kind == "efficient" else 0

    @property
    def _projections(self) -> float:
        if self.kind == "static_kernel":
            return 0.0
        gate = 2.0 * self.hidden_size * self.num_gates
        return 4.0 * self.hidden_size * (self.hidden_size + self.num_heads * self.value_size) + gate


@dataclass(frozen=True)
class SoftmaxAttention:
    """`softmax`: keys and values of every token so far, spread over the ranks that read them."""

    hidden_size: int
    num_heads: int
    taps: int
    projection_bias: bool = False
    reach: int | None = None  # of relative positions; None: there are none
    relative_values: bool = True  # they are for values too
    relative_shared: bool = False  # and the same for all heads
    value_rank: int | None = None  # of the maps of values; None: that of keys

    @property
    def values(self) -> int:
        """H V: numbers in the values of a token."""
        return self.hidden_size if self.value_rank is None else self.num_heads * self.value_rank

    @property
    def parameters(self) -> int:
        """Projections 2 D (D + H V), biases 3 D + H V if any, taps K D, a row per distance back for keys and values."""
        bias = 3 * self.hidden_size + self.values if self.projection_bias else 0
        rows = 0 if self.reach is None else (self.reach + 1) * self._row_numbers
        if self.relative_shared:
            rows //= self.num_heads
        return 2 * self.hidden_size * (self.hidden_size + self.values) + bias + self.taps * self.hidden_size + rows

    @property
    def buffers(self) -> int:
        """None."""
        return 0

    @property
    def linear(self) -> LinearWeights:
        """Projections 2 D (D + H V), to 2 D + H V outputs and from H V to D."""
        size, values = self.hidden_size, self.values
        return LinearWeights(2 * size * (size + values), 3 * size + values)

    def state_bytes(self, position: int, batch: int = 1) -> int:
        """A key and a value per token, and the last K - 1 tokens of the convolution."""
        tail = max(0, self.taps - 1) * self.hidden_size
        return FLOAT_BYTES * batch * (position * (self.hidden_size + self.values) + tail)

    def kept_tokens(self, position: int, ranks: int) -> int:
        """Its share of every block."""
        return -(-position // ranks)

    def scan_message(self, batch: int = 1) -> ScanMessage | None:
        """None: there is no state to carry."""
        return None

    def carry_bytes(self, batch: int = 1) -> int:
        """There is no state to carry."""
        return 0

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """The first block by head reshuffle, (P - 1) / P of 2 L (D + H V) numbers; then queries and partial outputs.

        These are (P - 1) L (D + H V + H) numbers for L tokens of each rank. For heads that P divides.
        """
        if ranks == 1:
            return 0
        first = min(tokens, ranks * block_tokens)
        heads = (ranks - 1) * first * 2 * (self.hidden_size + self.values) // ranks**2
        partial = (ranks - 1) * (tokens - first) * (self.hidden_size + self.values + self.num_heads) // ranks
        return FLOAT_BYTES * (heads + partial)

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """The queries of a block, and its partial outputs when they are joined and when they are sent."""
        if ranks == 1:
            return 0
        return FLOAT_BYTES * ranks * block_tokens * (self.hidden_size + 2 * self.values + 2 * self.num_heads)

    def halo_bytes(self, batch: int = 1) -> int:
        """4 B (K - 1) D."""
        return FLOAT_BYTES * batch * max(0, self.taps - 1) * self.hidden_size

    @property
    def travels(self) -> str:
        """What ranks send each other."""
        return "all tokens of some heads, edge tokens" if self.taps > 1 else "all tokens of some heads"

    def bytes_sent(self, lengths: Sequence[int], rank: int, batch: int = 1) -> int:
        """Edge tokens, and heads there and back by the reshuffle, for heads that P divides."""
        ranks, own = len(lengths), lengths[rank]
        there = own * (ranks - 1) * (2 * self.hidden_size + self.values) // ranks
        back = (sum(lengths) - own) * self.values // ranks
        return all_gather_bytes(self.halo_bytes(batch), ranks) + FLOAT_BYTES * batch * (there + back)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Every token looks at half of the others, and at the rows of relative positions."""
        scores = 1.0 * (self.hidden_size + self.values) * tokens + self._row_flops
        return TokenFlops(projections=self._projections, scores=scores)

    def decode_flops(self, position: int) -> TokenFlops:
        """One query over all keys and values so far."""
        scores = 2.0 * (self.hidden_size + self.values) * position + self._row_flops
        return TokenFlops(projections=self._projections, scores=scores)

    @property
    def _projections(self) -> float:
        return 4.0 * self.hidden_size * (self.hidden_size + self.values)

    @property
    def _row_numbers(self) -> int:
        return self.hidden_size + (self.values if self.relative_values else 0)

    @property
    def _row_flops(self) -> float:
        """A query by each of 2 k + 1 rows of keys, and the weights of each distance by as many rows of values."""
        return 0.0 if self.reach is None else 2.0 * (2 * self.reach + 1) * self._row_numbers

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About nine tensors of [B, L, D]; the fused kernel never holds the scores.

        With relative positions a tile: its scores two and a half times, its rows of 8 bytes three times, and what each
        query has for each row twice.
        """
        around = FLOAT_BYTES * batch * tokens * (5 * self.hidden_size + 4 * max(self.values, self.hidden_size))
        if self.reach is None:
            return around
        rows = min(tokens, TILE_QUERIES)
        pairs = rows * min(tokens, TILE_KEYS)
        heads = min(batch * self.num_heads, max(1, TILE_ELEMENTS // max(1, pairs)))
        tile = heads * (5 * pairs // 2 + 2 * rows * (2 * self.reach + 1))
        return around + FLOAT_BYTES * tile + 3 * POSITION_BYTES * pairs
