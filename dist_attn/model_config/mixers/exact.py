"""Exact softmax attention, whose state has a key and a value of every token so far.

Letters: B batch, D model size, H heads, V values per head, L tokens, P ranks.
"""

from typing import Literal

from dist_attn.model_config.figures import FLOAT_BYTES, POSITION_BYTES, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.heads import HeadsConfig, RelativeConfig

TILE_QUERIES, TILE_KEYS, TILE_ELEMENTS = 256, 1024, 1 << 19  # of exact attention with relative positions


class SoftmaxConfig(HeadsConfig, MixerConfig):
    """Exact softmax attention."""

    kind: Literal["softmax"]
    relative: RelativeConfig | None = None

    def weights(self) -> Weights:
        """q, k, v and output, taps K D, a row per distance back for keys and values."""
        size, values, bias = self.hidden_size, self.values_size, self.projection_bias
        rows = 0 if self.relative is None else self.relative_weights(self.relative.reach + 1)
        own = Weights(others=self.short_convolution * size + rows)
        return linear(size, 2 * size + values, bias=bias) + linear(values, size, bias=bias) + own

    def relative_weights(self, rows: int) -> int:
        """Numbers in so many rows of relative positions."""
        if self.relative is None:
            return 0
        return rows * self._row_numbers // (self.num_heads if self.relative.shared else 1)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """A key and a value per token, and the edge tokens of the convolution."""
        return FLOAT_BYTES * batch * position * (self.hidden_size + self.values_size) + self._edge_bytes(batch)

    def kept_tokens(self, position: int, ranks: int) -> int:
        """Its share of every block."""
        return -(-position // ranks)

    def traffic(self, batch: int = 1) -> Traffic:
        """Edge tokens, and heads there and back by the reshuffle, for heads that P divides."""
        return Traffic(
            edge_bytes=self._edge_bytes(batch),
            columns=2 * self.hidden_size + self.values_size,
            columns_back=self.values_size,
            column_bytes=FLOAT_BYTES * batch,
            columns_are="heads",
        )

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """The first block by head reshuffle, (P - 1) / P of 2 L (D + H V) numbers; then queries and partial outputs.

        These are (P - 1) L (D + H V + H) numbers for L tokens of each rank. For heads that P divides.
        """
        if ranks == 1:
            return 0
        first, width = min(tokens, ranks * block_tokens), self.hidden_size + self.values_size
        heads = (ranks - 1) * first * 2 * width // ranks**2
        partial = (ranks - 1) * (tokens - first) * (width + self.num_heads) // ranks
        return FLOAT_BYTES * (heads + partial)

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """The queries of a block, and its partial outputs when they are joined and when they are sent."""
        if ranks == 1:
            return 0
        return FLOAT_BYTES * ranks * block_tokens * (self.hidden_size + 2 * self.values_size + 2 * self.num_heads)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Every token looks at half of the others, and at the rows of relative positions."""
        scores = 1.0 * (self.hidden_size + self.values_size) * tokens + self._row_flops
        return TokenFlops(projections=2.0 * self.weights().matrices, scores=scores)

    def decode_flops(self, position: int) -> TokenFlops:
        """One query over all keys and values so far."""
        return self.prefill_flops(2 * position)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """About nine tensors of [B, L, D]; the fused kernel never holds the scores.

        With relative positions a tile: its scores two and a half times, its rows of 8 bytes three times, and what each
        query has for each row twice.
        """
        widest = max(self.values_size, self.hidden_size)
        around = FLOAT_BYTES * batch * tokens * (5 * self.hidden_size + 4 * widest)
        if self.relative is None:
            return around
        rows = min(tokens, TILE_QUERIES)
        pairs = rows * min(tokens, TILE_KEYS)
        heads = min(batch * self.num_heads, max(1, TILE_ELEMENTS // max(1, pairs)))
        tile = heads * (5 * pairs // 2 + 2 * rows * (2 * self.relative.reach + 1))
        return around + FLOAT_BYTES * tile + 3 * POSITION_BYTES * pairs

    def _edge_bytes(self, batch: int) -> int:
        return FLOAT_BYTES * batch * max(0, self.short_convolution - 1) * self.hidden_size

    @property
    def _row_numbers(self) -> int:
        """Of one row of every head."""
        return self.hidden_size + (self.values_size if self.relative is not None and self.relative.values else 0)

    @property
    def _row_flops(self) -> float:
        """A query by each of 2 k + 1 rows of keys, and the weights of each distance by as many rows of values."""
        return 0.0 if self.relative is None else 2.0 * (2 * self.relative.reach + 1) * self._row_numbers


register_mixer(SoftmaxConfig, "dist_attn.mixers.softmax:SoftmaxAttention")
