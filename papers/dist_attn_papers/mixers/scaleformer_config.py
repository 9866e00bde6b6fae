"""Scaleformer's options and costs: kernel attention with Shaw's relative positions, causal and over all keys.

Letters: B batch, D model size, H heads, K head size (as many features), V values per head, L tokens, k reach.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from dist_attn.model_config.figures import FLOAT_BYTES, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.attention import AttentionKind, register_attention
from dist_attn.model_config.mixers.heads import HeadSizes
from dist_attn.model_config.mixers.kernels import BLOCK_GROUP_TOKENS, CHUNK_TOKENS


class ScaleformerConfig(HeadSizes, MixerConfig):
    """Causal kernel attention (elu + 1) with Shaw's relative positions, clipped at `reach` tokens."""

    kind: Literal["scaleformer"]
    reach: int = Field(default=16, ge=0, le=1024)

    @property
    def packs(self) -> bool:
        """Return False: a window goes on from token to token."""
        return False

    def weights(self) -> Weights:
        """The weights of the projections, and k + 1 rows of positions."""
        size, values = self.hidden_size, self.values_size
        rows = Weights(others=(self.reach + 1) * size)
        return linear(size, 2 * size + values) + linear(values, size) + rows

    def sums_bytes(self, batch: int, windows: int = 1) -> int:
        """The bytes 4 B H (K + n max(k, 1)) (V + 1): the kernel sum of every head, and its n windows."""
        numbers = (self.head_size + windows * max(self.reach, 1)) * (self.value_size + 1)
        return FLOAT_BYTES * batch * self.num_heads * numbers

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of the kernel sum and a window, whatever the length."""
        return self.sums_bytes(batch)

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the state, by an all-gather whatever the exchange."""
        return Traffic(gathered_bytes=self.sums_bytes(batch))

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the windowed form; of several ranks each reads its keys twice, for the state it sends."""
        size, width = self.head_size, self.value_size + 1
        passes = 2 if ranks == 1 else 3
        return TokenFlops(
            projections=2.0 * self.weights().matrices,
            features=2.0 * self.num_heads * size * (self.reach + 1),
            scores=1.0 * self.num_heads * CHUNK_TOKENS * (size + width),
            state=2.0 * self.num_heads * width * (passes * size + max(1, self.reach)),
        )

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of a state's update and read-out, and of all positions' scores: equal for every token."""
        size, width = self.head_size, self.value_size + 1
        return TokenFlops(
            projections=2.0 * self.weights().matrices,
            features=2.0 * self.num_heads * size * (2 * self.reach + 1),
            state=2.0 * self.num_heads * width * (2 * size + max(1, self.reach)),
        )

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of twelve tensors of [B, L, D] around the attention; of scores, windows and sums of one block."""
        groups = batch * self.num_heads
        chunks = max(1, min(8, BLOCK_GROUP_TOKENS // (CHUNK_TOKENS * groups)))
        width = self.value_size + 1
        scores = 5 * CHUNK_TOKENS + 2 * self.reach + 1
        block = (scores + 2 * width) * min(tokens, chunks * CHUNK_TOKENS)
        around = batch * tokens * (6 * self.hidden_size + 6 * max(self.values_size, self.hidden_size))
        sums = (2 + chunks) * max(width, self.head_size + 1) * width
        return FLOAT_BYTES * (around + groups * (block + sums))


register_mixer(ScaleformerConfig, "dist_attn_papers.mixers.scaleformer:ScaleformerAttention")


class ScaleformerAttentionKind(AttentionKind):
    """Scaleformer over all keys, with a window on each side of a token."""

    def weights(self, causal: MixerConfig) -> Weights:
        """The weights, with rows for later keys."""
        assert isinstance(causal, ScaleformerConfig)
        return causal.weights() + Weights(others=causal.reach * causal.hidden_size)

    def traffic(self, causal: MixerConfig, batch: int) -> Traffic:
        """The traffic of a state with two windows."""
        assert isinstance(causal, ScaleformerConfig)
        return Traffic(gathered_bytes=causal.sums_bytes(batch, windows=2))

    def prefill_flops(self, causal: MixerConfig, tokens: int) -> TokenFlops:
        """The operations, with the sums of a window more and twice the position scores."""
        assert isinstance(causal, ScaleformerConfig)
        parts = causal.prefill_flops(tokens)
        ahead = 2.0 * causal.num_heads * (causal.value_size + 1) * max(0, causal.reach - 1)
        return replace(parts, features=2 * parts.features, scores=0.0, state=parts.state + ahead)


register_attention(
    "scaleformer",
    ScaleformerAttentionKind(ScaleformerConfig, "dist_attn_papers.mixers.scaleformer:ScaleformerOverAllKeys"),
)
