"""Attention that is exact or sees all keys: softmax, and both directions by any kernel.

Letters: B batch, D model size, H heads, K head size (as many features), V values per head, L tokens, P ranks, k reach
of relative positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import FLOAT_BYTES, POSITION_BYTES, TokenFlops, Traffic, Weights, linear
from dist_attn.model_config.mixer import MixerConfig, register_mixer
from dist_attn.model_config.mixers.heads import (
    DenominatorConfig,
    FeaturesConfig,
    HeadsConfig,
    RelativeConfig,
    check_key_weights,
)
from dist_attn.model_config.mixers.kernels import EluConfig, RandomFeatureConfig
from dist_attn.model_config.registry import Build, Registry, place_of

TILE_QUERIES, TILE_KEYS, TILE_ELEMENTS = 256, 1024, 1 << 19  # of exact attention with relative positions


class SoftmaxConfig(HeadsConfig, MixerConfig):
    """Exact softmax attention."""

    kind: Literal["softmax"]
    relative: RelativeConfig | None = None

    def weights(self) -> Weights:
        """The weights of q, k, v and output, taps K D, a row per distance back for keys and values."""
        size, values, bias = self.hidden_size, self.values_size, self.projection_bias
        rows = 0 if self.relative is None else self.relative_weights(self.relative.reach + 1)
        own = Weights(others=self.short_convolution * size + rows)
        return linear(size, 2 * size + values, bias=bias) + linear(values, size, bias=bias) + own

    def relative_weights(self, rows: int) -> int:
        """The numbers in `rows` rows of relative positions."""
        if self.relative is None:
            return 0
        return rows * self._row_numbers // (self.num_heads if self.relative.shared else 1)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of a key and a value per token, and of the edge tokens of the convolution."""
        return FLOAT_BYTES * batch * position * (self.hidden_size + self.values_size) + self._edge_bytes(batch)

    def kept_tokens(self, position: int, ranks: int) -> int:
        """A rank's share of every block, in tokens."""
        return -(-position // ranks)

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of edge tokens, and of heads there and back by the reshuffle, for heads that P divides."""
        return Traffic(
            edge_bytes=self._edge_bytes(batch),
            columns=2 * self.hidden_size + self.values_size,
            columns_back=self.values_size,
            column_bytes=FLOAT_BYTES * batch,
            columns_are="heads",
        )

    def key_bytes_sent(self, tokens: int, ranks: int, block_tokens: int) -> int:
        """The bytes of the first block by reshuffle, (P - 1) / P of 2 L (D + H V) numbers; then queries and outputs.

        These are (P - 1) L (D + H V + H) numbers for L tokens of each rank. For heads that P divides.
        """
        if ranks == 1:
            return 0
        first, width = min(tokens, ranks * block_tokens), self.hidden_size + self.values_size
        heads = (ranks - 1) * first * 2 * width // ranks**2
        partial = (ranks - 1) * (tokens - first) * (width + self.num_heads) // ranks
        return FLOAT_BYTES * (heads + partial)

    def key_exchange_bytes(self, ranks: int, block_tokens: int) -> int:
        """The bytes of a block's queries, and of its partial outputs when they are joined and when they are sent."""
        if ranks == 1:
            return 0
        return FLOAT_BYTES * ranks * block_tokens * (self.hidden_size + 2 * self.values_size + 2 * self.num_heads)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations of a token that looks at half of the others, and at the rows of relative positions."""
        scores = 1.0 * (self.hidden_size + self.values_size) * tokens + self._row_flops
        return TokenFlops(projections=2.0 * self.weights().matrices, scores=scores)

    def decode_flops(self, position: int) -> TokenFlops:
        """The operations of one query over all keys and values so far."""
        return self.prefill_flops(2 * position)

    def activation_bytes(self, tokens: int, batch: int = 1) -> int:
        """The bytes of about nine tensors of [B, L, D], with rotary positions eleven; the fused kernel holds no scores.

        With relative positions a tile: its scores two and a half times, its rows of 8 bytes three times, and what each
        query has for each row twice.
        """
        widest = max(self.values_size, self.hidden_size)
        turned = 2 * (self.rotary is not None)
        around = FLOAT_BYTES * batch * tokens * ((5 + turned) * self.hidden_size + 4 * widest)
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
        """The numbers in one row of every head."""
        return self.hidden_size + (self.values_size if self.relative is not None and self.relative.values else 0)

    @property
    def _row_flops(self) -> float:
        """The operations of a query by each of 2 k + 1 rows of keys, and of weights by as many rows of values."""
        return 0.0 if self.relative is None else 2.0 * (2 * self.relative.reach + 1) * self._row_numbers


register_mixer(SoftmaxConfig, "dist_attn.mixers.softmax:SoftmaxAttention")


# The floor of rfa over all keys, as a share of their number: 0.3 of them would hide one key among a hundred.
ALL_KEYS_FLOOR = 0.03
# Options of `AttentionConfig` that only some kinds take, and the values with which they are not used.
UNUSED: Mapping[str, Any] = {"weighting": "unit_norm", "sigma": None, "pool": 0, "orthogonal": False, "relative": None}


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention over all keys, named after the causal mixer by the same kernel, and its costs beside that's.

    causal          the configuration of that mixer.
    build           makes the module, a `dist_attn.mixers.all_keys.AllKeys`, of an `AttentionConfig`.
    options         those of `UNUSED` that it takes.
    defaults        of options, where they differ from those of `AttentionConfig`.
    weighs_keys     whether keys have weights, so that no fixed number divides.
    """

    causal: type[MixerConfig]
    build: Build
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    weighs_keys: bool = False

    def weights(self, causal: MixerConfig) -> Weights:
        """The weights, by those of the causal mixer."""
        return causal.weights()

    def traffic(self, causal: MixerConfig, batch: int) -> Traffic:
        """The traffic between ranks."""
        return causal.traffic(batch)

    def prefill_flops(self, causal: MixerConfig, tokens: int) -> TokenFlops:
        """The operations: no scores in a chunk, and no second walk over keys."""
        return replace(causal.prefill_flops(tokens), scores=0.0)


ATTENTIONS: Registry[AttentionKind] = Registry("dist_attn.attentions", "attention")


class AttentionConfig(FeaturesConfig):
    """Attention that sees all keys, by one of the kernels; the options of features are those of `rfa`."""

    attention: str
    # The division of kernels. One that is not given is filled in for rfa (docs/decisions/0036). None: exact division
    # for elu, whose weights are positive; for rfa the floor of 0.3, which is what null means in the files of models
    # that were trained under it.
    denominator: DenominatorConfig | None = None
    reach: int = Field(default=16, ge=0, le=1024)  # of scaleformer
    relative: RelativeConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, values: Any) -> Any:
        """Fill in what a kind has by default."""
        if not isinstance(values, Mapping) or "attention" not in values:
            return values
        return {**ATTENTIONS.find(values["attention"]).defaults, **values}

    @model_validator(mode="after")
    def _options_fit(self) -> "AttentionConfig":
        kind = ATTENTIONS.find(self.attention)
        if self.weighting == "norm" or kind.weighs_keys:
            check_key_weights(self.denominator, "attention by weighted keys")
        for option, unused in UNUSED.items():
            if option not in kind.options and getattr(self, option) != unused:
                takers = ", ".join(sorted(name for name, one in ATTENTIONS.loaded().items() if option in one.options))
                raise ValueError(f"{option} is an option of {takers}; attention is {self.attention!r}")
        return self

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return False


class BidirectionalConfig(AttentionConfig, MixerConfig):
    """Self-attention in which every token sees every other: for encoders and classifiers."""

    forms: ClassVar[dict[str, Mapping[str, Any]]] = {}

    kind: Literal["bidirectional"] = "bidirectional"
    projection_bias: bool = False  # of q, k, v and the output

    def weights(self) -> Weights:
        """The weights of the causal kind, and rows for later keys too."""
        causal = self._causal()
        weights = ATTENTIONS.find(self.attention).weights(causal)
        if self.projection_bias and not hasattr(causal, "projection_bias"):
            weights += Weights(others=3 * self.hidden_size + self.values_size)
        return weights

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """No bytes: a later token could not go on from them."""
        return 0

    def traffic(self, batch: int = 1) -> Traffic:
        """The traffic of the causal kind, and of what its kind sends besides."""
        return ATTENTIONS.find(self.attention).traffic(self._causal(), batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations per token, those of the causal kind without a mask."""
        return ATTENTIONS.find(self.attention).prefill_flops(self._causal(), tokens)

    def _causal(self) -> MixerConfig:
        """Make the causal mixer by the same kernel, without a short convolution."""
        kind = ATTENTIONS.find(self.attention).causal
        named = {**self.model_dump(exclude={"denominator"}), "kind": self.attention, "short_convolution": 0}
        return kind.model_validate({name: value for name, value in named.items() if name in kind.model_fields})


def register_attention(kind: str, attention: AttentionKind) -> None:
    """Make a kind of attention over all keys known, and a form of `bidirectional`.

    Raises: ConfigError for a kind that is registered already.
    """
    ATTENTIONS.register([kind], attention, place_of(attention.causal))
    BidirectionalConfig.forms[kind] = {"attention": kind}


class SoftmaxAttentionKind(AttentionKind):
    """Softmax over all keys, which looks at twice as many and has rows for later ones."""

    def weights(self, causal: MixerConfig) -> Weights:
        """The weights, with rows for later keys."""
        assert isinstance(causal, SoftmaxConfig)
        rows = 0 if causal.relative is None else causal.relative_weights(causal.relative.reach)
        return causal.weights() + Weights(others=rows)

    def prefill_flops(self, causal: MixerConfig, tokens: int) -> TokenFlops:
        """The operations, with twice the scores."""
        parts = causal.prefill_flops(tokens)
        return replace(parts, scores=2 * parts.scores)


register_mixer(BidirectionalConfig, "dist_attn.mixers.all_keys:BidirectionalAttention")
register_attention(
    "rfa",
    AttentionKind(
        RandomFeatureConfig,
        "dist_attn.mixers.all_keys:RandomFeaturesOverAllKeys",
        options=("weighting", "sigma", "pool", "orthogonal"),
        defaults={"denominator": {"kind": "floor", "eps": ALL_KEYS_FLOOR}},
    ),
)
register_attention("elu", AttentionKind(EluConfig, "dist_attn.mixers.all_keys:EluOverAllKeys"))
register_attention(
    "softmax",
    SoftmaxAttentionKind(SoftmaxConfig, "dist_attn.mixers.all_keys:SoftmaxOverAllKeys", options=("relative",)),
)
