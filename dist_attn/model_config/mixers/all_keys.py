"""Attention that sees all keys: of a sequence to itself in both directions, and of a decoder to a memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import TokenFlops, Traffic, Weights
from dist_attn.model_config.mixer import MixerConfig, mixer_config_class, register_mixer
from dist_attn.model_config.mixers.exact import SoftmaxConfig
from dist_attn.model_config.mixers.heads import DenominatorConfig, FeaturesConfig, RelativeConfig, check_key_weights
from dist_attn.model_config.mixers.scaleformer import ScaleformerConfig

RANDOM_KERNELS = ("rfa", "performer")


class AttentionConfig(FeaturesConfig):
    """Attention that sees all keys, by one of the kernels; the options of features are those of `rfa`."""

    attention: Literal["rfa", "elu", "performer", "efficient", "scaleformer", "softmax"]
    # Of rfa, elu, performer and efficient. None: the default floor for rfa; exact division for elu, whose weights are
    # positive; a floor that only keeps 0 / 0 away for performer and efficient.
    denominator: DenominatorConfig | None = None
    reach: int = Field(default=16, ge=0, le=1024)  # of scaleformer
    relative: RelativeConfig | None = None  # of softmax

    @model_validator(mode="before")
    @classmethod
    def _performer_is_orthogonal(cls, values: Any) -> Any:
        """Unless it is said otherwise, as for the causal mixer."""
        if isinstance(values, Mapping) and values.get("attention") == "performer":
            return {"orthogonal": True, **values}
        return values

    @model_validator(mode="after")
    def _options_fit(self) -> "AttentionConfig":
        if self.weighting == "norm" or self.attention in ("performer", "efficient"):
            check_key_weights(self.denominator, "attention by weighted keys")
        if self.attention != "rfa" and self.weighting != "unit_norm":
            raise ValueError(f"weighting is an option of 'rfa'; attention is {self.attention!r}")
        if self.attention not in RANDOM_KERNELS and (self.pool or self.orthogonal):
            raise ValueError(
                f"pool and orthogonal are options of 'rfa' and 'performer'; attention is {self.attention!r}"
            )
        if self.relative is not None and self.attention != "softmax":
            raise ValueError(
                f"relative positions in the manner of Shaw were given to attention {self.attention!r}; take 'softmax', "
                "or 'scaleformer', which has its own"
            )
        return self

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return False


class BidirectionalConfig(AttentionConfig, MixerConfig):
    """Self-attention in which every token sees every other: for encoders and classifiers."""

    forms = {  # noqa: RUF012
        attention: {"attention": attention}
        for attention in ("rfa", "elu", "performer", "efficient", "scaleformer", "softmax")
    }

    kind: Literal["bidirectional"] = "bidirectional"
    projection_bias: bool = False  # of q, k, v and the output

    def weights(self) -> Weights:
        """Those of the causal kind, and rows for later keys too."""
        causal = self._causal()
        bias = 3 * self.hidden_size + self.values_size if self.projection_bias else 0
        match causal:
            case ScaleformerConfig():
                return causal.weights() + Weights(others=causal.reach * self.hidden_size + bias)
            case SoftmaxConfig(relative=RelativeConfig(reach=reach)):
                return causal.weights() + Weights(others=causal.relative_weights(reach))
        return causal.weights()

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """None: a later token could not go on from it."""
        return 0

    def traffic(self, batch: int = 1) -> Traffic:
        """What the causal kind sends; of `scaleformer` windows on both sides."""
        causal = self._causal()
        if isinstance(causal, ScaleformerConfig):
            return Traffic(gathered_bytes=causal.sums_bytes(batch, windows=2))
        return causal.traffic(batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """Of softmax twice the scores; of kernels no scores inside a chunk, and no second walk over keys."""
        causal = self._causal()
        parts = causal.prefill_flops(tokens)
        if isinstance(causal, SoftmaxConfig):
            return replace(parts, scores=2 * parts.scores)
        if isinstance(causal, ScaleformerConfig):
            ahead = 2.0 * self.num_heads * (self.value_size + 1) * max(0, self.reach - 1)
            return replace(parts, features=2 * parts.features, scores=0.0, state=parts.state + ahead)
        return replace(parts, scores=0.0)

    def _causal(self) -> MixerConfig:
        """The causal mixer by the same kernel, without a short convolution."""
        kind = mixer_config_class(self.attention)
        named = {**self.model_dump(exclude={"denominator"}), "kind": self.attention, "short_convolution": 0}
        return kind.model_validate({name: value for name, value in named.items() if name in kind.model_fields})


class CrossConfig(AttentionConfig):
    """Attention of a decoder's tokens over all tokens of a memory."""

    kind: Literal["cross"] = "cross"


register_mixer(BidirectionalConfig, "dist_attn.mixers.all_keys:BidirectionalAttention")
