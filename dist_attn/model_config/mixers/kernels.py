"""Causal attention by kernels, over a state of constant size: random features and elu + 1.

Letters: B batch, D model size, H heads, K numbers of a head's key, M features, V values per head, C tokens of a chunk.
"""

from abc import abstractmethod
from typing import Literal

from pydantic import model_validator

from dist_attn.model_config.figures import (
    FLOAT_BYTES,
    POSITION_BYTES,
    ScanMessage,
    TokenFlops,
    Traffic,
    Weights,
    linear,
)
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.heads import (
    DenominatorConfig,
    FeaturesConfig,
    HeadsConfig,
    HeadSizes,
    check_key_weights,
)

CHUNK_TOKENS = 64  # of the blocked form of kernel attention
BLOCK_GROUP_TOKENS = 8 * 512  # tokens times heads times batch that it works on at once


class KernelCosts(HeadSizes, MixerConfig):
    """The costs of a mixer whose state has M (V + 1) + 2 numbers for each head, whatever the length."""

    @property
    @abstractmethod
    def num_features(self) -> int:
        """The number M of features."""

    @property
    def random_vectors(self) -> int:
        """The number of random vectors of each head."""
        return 0

    @property
    def gates(self) -> int:
        """The number of gates: one per head, one for all, or none."""
        return 0

    @property
    def weighs_keys(self) -> bool:
        """Return whether keys have weights, so that states are held in units of their own."""
        return False

    @property
    def counts_positions(self) -> bool:
        """Return whether a state holds the number of its tokens."""
        return False

    @property
    def taps(self) -> int:
        """The taps of the short convolution."""
        return 0

    @property
    def mean_numbers(self) -> int:
        """The numbers of a second state, that of the keys' means."""
        return 0

    @property
    def tensors(self) -> int:
        """The number of tensors of [B, L, D] around the attention."""
        return 8

    @property
    def state_numbers(self) -> int:
        """The numbers of a head's state: S, z, mass and log decay."""
        return self.num_features * (self.value_size + 1) + 2

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of heads' states and flags, a float64 unit where keys have weights, a position, and edge tokens."""
        heads = self.num_heads * (FLOAT_BYTES * self.state_numbers + 1 + (8 if self.weighs_keys else 0))
        return batch * (heads + POSITION_BYTES * self.counts_positions) + self.traffic(batch).edge_bytes

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the scan of states, K - 1 edge tokens, and 16 B H bytes for the unit of key weights."""
        return Traffic(
            scanned=ScanMessage(batch * self.num_heads, self.state_numbers + self.mean_numbers - 1),
            edge_bytes=FLOAT_BYTES * batch * max(0, self.taps - 1) * self.hidden_size,
            aside_bytes=16 * batch * self.num_heads if self.weighs_keys else 0,
        )

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of the blocked form; of several ranks each reads its keys twice, for the state it sends."""
        passes = 2 if ranks == 1 else 3
        # Per head: C M for q k^T, C (V + 1) for the weighted sum; gates add C for the mass. Half of it is causal.
        per_head = self.num_features + self.value_size + 1 + (self.gates > 0 or self.weighs_keys) + self.mean_numbers
        per_pass = self.num_features * (self.value_size + 1) + max(0, self.mean_numbers - 2)
        return TokenFlops(
            projections=2.0 * self.weights().matrices + 2.0 * self.hidden_size * self.gates,
            features=passes * 2.0 * self.hidden_size * self.random_vectors,
            scores=1.0 * self.num_heads * CHUNK_TOKENS * per_head,
            state=passes * 2.0 * self.num_heads * per_pass,
        )

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of tensors of [B, L, D], four of them values, maybe wider; features and scores of a block."""
        groups = batch * self.num_heads
        chunks = max(1, min(8, BLOCK_GROUP_TOKENS // (CHUNK_TOKENS * groups)))
        width = self.value_size + 1
        per_token = 4 * self.num_features + 4 * CHUNK_TOKENS + 6 * width
        states = 3 * self.num_features * width * chunks
        block = groups * (per_token * min(tokens, chunks * CHUNK_TOKENS) + states)
        numbers = (self.tensors - 4) * self.hidden_size + 4 * max(self.values_size, self.hidden_size)
        return FLOAT_BYTES * (batch * tokens * numbers + block)


class _ProjectedConfig(HeadsConfig, KernelCosts):
    """The configuration of q, k, v and output projections, and perhaps gates, a convolution and rotary positions."""

    @property
    def taps(self) -> int:
        """The taps of the short convolution."""
        return self.short_convolution

    @property
    def counts_positions(self) -> bool:
        """Return whether queries and keys are turned by the number of tokens."""
        return self.rotary is not None

    @property
    def tensors(self) -> int:
        """The number of tensors of [B, L, D]; rotary positions make two more."""
        return 8 + 2 * self.counts_positions

    def weights(self) -> Weights:
        """The weights of q, k, v and output, taps K D, a row and a bias for each gate, all heads' random vectors."""
        size, values, bias = self.hidden_size, self.values_size, self.projection_bias
        own = Weights(
            others=self.short_convolution * size + self.gates * (size + 1), buffers=self.random_vectors * size
        )
        return linear(size, 2 * size + values, bias=bias) + linear(values, size, bias=bias) + own


class RandomFeatureConfig(_ProjectedConfig, FeaturesConfig):
    """Random feature attention (`rfa`) and its gated form (`rfa_gate`)."""

    kind: Literal["rfa", "rfa_gate"]
    denominator: DenominatorConfig = DenominatorConfig()
    # One gate for all heads in place of one each; an option of rfa_gate.
    shared_gate: bool = False

    @property
    def gated(self) -> bool:
        """Return whether the state forgets."""
        return self.kind == "rfa_gate"

    @property
    def gates(self) -> int:
        """The number of gates: one per head, one for all, or none."""
        return (1 if self.shared_gate else self.num_heads) if self.gated else 0

    @property
    def num_features(self) -> int:
        """The number of features; a Gaussian map has a sine and a cosine for every random vector."""
        return self.num_random * (2 if self.feature == "gaussian" else 1)

    @property
    def random_vectors(self) -> int:
        """The number of random vectors of each head."""
        return self.num_random

    @property
    def weighs_keys(self) -> bool:
        """Return whether keys have weights, as those without unit norm have."""
        return self.weighting == "norm"

    def weights(self) -> Weights:
        """The weights with sigma, a number for each of a token's."""
        return super().weights() + Weights(others=self.hidden_size)

    @model_validator(mode="after")
    def _options_fit(self) -> "RandomFeatureConfig":
        if self.weighting == "norm":
            check_key_weights(self.denominator, "weighting 'norm'")
        if self.shared_gate and not self.gated:
            raise ValueError("shared_gate was given to a mixer without gates; take kind rfa_gate")
        return self


class PositiveConfig(_ProjectedConfig):
    """A kernel whose features are positive, so that a divisor is never small by chance."""

    # Only keeps 0 / 0 away where all weights have underflowed.
    denominator: DenominatorConfig = DenominatorConfig(kind="floor", eps=1e-12)
    # The state forgets by a gate of each head, or by one of all heads.
    gated: bool = False
    shared_gate: bool = False

    @property
    def gates(self) -> int:
        """The number of gates: one per head, one for all, or none."""
        return (1 if self.shared_gate else self.num_heads) if self.gated else 0

    @property
    def num_features(self) -> int:
        """The number of features, which is that of a head's numbers."""
        return self.head_size

    @model_validator(mode="after")
    def _gates_fit(self) -> "PositiveConfig":
        if self.shared_gate and not self.gated:
            raise ValueError("shared_gate was given to a mixer without gates; set gated = true")
        if self.weighs_keys:
            check_key_weights(self.denominator, "attention by weighted keys")
        return self


class EluConfig(PositiveConfig):
    """Causal attention with the feature map elu + 1."""

    kind: Literal["elu"]


register_mixer(RandomFeatureConfig, "dist_attn.mixers.feature_map_attention:RandomFeatureAttention")
register_mixer(EluConfig, "dist_attn.mixers.feature_map_attention:EluAttention")
