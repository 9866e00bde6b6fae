"""What a mixer is made of: frozen configuration values with a `kind`, read from a model folder's config.json."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dist_attn.mixers.head_config import DenominatorConfig, HeadsConfig, HeadSizes, RelativeConfig
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
from dist_attn.mixers.kernel_config import EluConfig

__all__ = [
    "BidirectionalConfig",
    "CrossConfig",
    "EluConfig",
    "MixerConfig",
    "RandomFeatureConfig",
    "ScaleformerConfig",
    "SoftmaxConfig",
]


class _FeaturesConfig(HeadSizes):
    feature: Literal["gaussian", "arc_cosine"] = "gaussian"
    num_random: int = Field(default=64, ge=1)
    seed: int = 0
    # Rows of a head's random matrix are orthogonal to each other, `head_size` at a time.
    orthogonal: bool = False
    # In training every head draws its matrix at every step from so many; 0: each keeps the one it has.
    pool: int = Field(default=0, ge=0)
    # Queries and keys have unit norm, or keys weigh exp(|sigma k|^2 / 2) and neither is normalised.
    weighting: Literal["unit_norm", "norm"] = "unit_norm"

    @property
    def first_sigma(self) -> float:
        """Where sigma begins: 1 for unit norms; else at softmax's temperature, logits q.k / sqrt(K)."""
        return 1.0 if self.weighting == "unit_norm" else self.head_size**-0.25

    @model_validator(mode="after")
    def _features_fit(self) -> "_FeaturesConfig":
        if 0 < self.pool < self.num_heads:
            raise ValueError(
                f"a pool of {self.pool} matrices is too small for {self.num_heads} heads, which all differ"
            )
        if self.weighting == "norm" and self.feature != "gaussian":
            raise ValueError(f"weighting 'norm' is that of the Gaussian kernel; feature is {self.feature!r}")
        return self


def _check_weighting(weighting: str, denominator: DenominatorConfig | None) -> None:
    """Key weights have no fixed unit, so a divisor must not have one either."""
    if weighting == "norm" and denominator is not None and denominator.kind not in ("floor", "exact"):
        raise ValueError(
            f"weighting 'norm' was given with the denominator {denominator.kind!r}, which compares with a fixed "
            "number; take 'floor' or 'exact'"
        )


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
        _check_weighting(self.weighting, self.denominator)
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
    """Attention that sees all keys: random features, elu + 1, elu + 1 with relative positions, or exact softmax.

    The options of features are those of `rfa`.
    """

    attention: Literal["rfa", "elu", "scaleformer", "softmax"]
    # Of rfa and elu. None: the default floor for rfa; exact division for elu, whose weights are positive.
    denominator: DenominatorConfig | None = None
    reach: int = Field(default=16, ge=0, le=1024)  # of scaleformer
    relative: RelativeConfig | None = None  # of softmax

    @model_validator(mode="after")
    def _options_fit(self) -> "_AttentionConfig":
        _check_weighting(self.weighting, self.denominator)
        if self.attention != "rfa" and (self.pool or self.orthogonal or self.weighting != "unit_norm"):
            raise ValueError(f"pool, orthogonal and weighting are options of 'rfa'; attention is {self.attention!r}")
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
