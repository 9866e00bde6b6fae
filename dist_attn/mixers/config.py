"""What a mixer is made of: frozen configuration values with a `kind`, read from a model folder's config.json."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dist_attn.mixers.head_config import (
    DenominatorConfig,
    HeadsConfig,
    HeadSizes,
    MatricesConfig,
    RelativeConfig,
    check_key_weights,
)
from dist_attn.mixers.input_independent_config import (
    ConvolutionConfig,
    FourierConfig,
    HippoConfig,
    LsslConfig,
    S4Config,
    S4DConfig,
    SgConvConfig,
    TokenMlpConfig,
)
from dist_attn.mixers.kernel_config import EfficientConfig, EluConfig, PerformerConfig, StaticKernelConfig

__all__ = [
    "BidirectionalConfig",
    "CrossConfig",
    "EfficientConfig",
    "EluConfig",
    "MixerConfig",
    "PerformerConfig",
    "RandomFeatureConfig",
    "ScaleformerConfig",
    "SoftmaxConfig",
    "StaticKernelConfig",
]

RANDOM_KERNELS = ("rfa", "performer")


class _FeaturesConfig(MatricesConfig):
    feature: Literal["gaussian", "arc_cosine"] = "gaussian"
    # Queries and keys have unit norm, or keys weigh exp(|sigma k|^2 / 2) and neither is normalised.
    weighting: Literal["unit_norm", "norm"] = "unit_norm"

    @property
    def first_sigma(self) -> float:
        """Where sigma begins: 1 for unit norms; else at softmax's temperature, logits q.k / sqrt(K)."""
        return 1.0 if self.weighting == "unit_norm" else self.softmax_scale

    @model_validator(mode="after")
    def _features_fit(self) -> "_FeaturesConfig":
        if self.weighting == "norm" and self.feature != "gaussian":
            raise ValueError(f"weighting 'norm' is that of the Gaussian kernel; feature is {self.feature!r}")
        return self


class RandomFeatureConfig(HeadsConfig, _FeaturesConfig):
    """Random feature attention (`rfa`) and its gated form (`rfa_gate`)."""

    kind: Literal["rfa", "rfa_gate"]
    denominator: DenominatorConfig = DenominatorConfig()
    # One gate for all heads in place of one each; of rfa_gate.
    shared_gate: bool = False

    @property
    def gated(self) -> bool:
        """Whether the state forgets."""
        return self.kind == "rfa_gate"

    @model_validator(mode="after")
    def _options_fit(self) -> "RandomFeatureConfig":
        if self.weighting == "norm":
            check_key_weights(self.denominator, "weighting 'norm'")
        if self.shared_gate and not self.gated:
            raise ValueError("shared_gate was given to a mixer without gates; take kind rfa_gate")
        return self


class SoftmaxConfig(HeadsConfig):
    """Exact softmax attention."""

    kind: Literal["softmax"]
    relative: RelativeConfig | None = None


class ScaleformerConfig(HeadSizes):
    """Causal kernel attention (elu + 1) with Shaw's relative positions, clipped at `reach` tokens."""

    kind: Literal["scaleformer"]
    reach: int = Field(default=16, ge=0, le=1024)


class _AttentionConfig(_FeaturesConfig):
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
    def _options_fit(self) -> "_AttentionConfig":
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


class BidirectionalConfig(_AttentionConfig):
    """Self-attention in which every token sees every other: for encoders and classifiers."""

    kind: Literal["bidirectional"] = "bidirectional"
    projection_bias: bool = False  # of q, k, v and the output


class CrossConfig(_AttentionConfig):
    """Attention of a decoder's tokens over all tokens of a memory."""

    kind: Literal["cross"] = "cross"


MixerConfig = Annotated[
    RandomFeatureConfig
    | SoftmaxConfig
    | ScaleformerConfig
    | EluConfig
    | EfficientConfig
    | PerformerConfig
    | StaticKernelConfig
    | ConvolutionConfig
    | FourierConfig
    | TokenMlpConfig
    | SgConvConfig
    | S4DConfig
    | S4Config
    | LsslConfig
    | HippoConfig,
    Field(discriminator="kind"),
]
