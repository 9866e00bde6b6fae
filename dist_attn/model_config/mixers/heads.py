"""The common parts of attention mixers' configurations: heads, projections, positions, and division of sums."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.registry import FrozenConfig


class DenominatorConfig(FrozenConfig):
    """The saved form of `ops.Denominator`."""

    kind: Literal["floor", "exact", "clamp", "sign_clamp", "abs_clamp"] = "floor"
    # The floor of causal mixers, in units of the carried mass; attention over all keys sets its own (decision 0036).
    eps: float = Field(default=0.3, ge=0, allow_inf_nan=False)


class RotaryConfig(FrozenConfig):
    """Queries and keys turned by their position, as `mixers.heads.rotate` does."""

    # Leading numbers of each head that turn; the others stay as they are.
    size: int = Field(ge=2, multiple_of=2)
    base: float = Field(default=10_000.0, gt=1, allow_inf_nan=False)


class RelativeConfig(FrozenConfig):
    """Learned vectors for the distance of a key from its query, added to keys and values (Shaw et al. 2018)."""

    # The distance from which on all are alike.
    reach: int = Field(default=16, ge=0, le=1024)
    values: bool = True  # vectors for the values too, not for the keys alone
    shared: bool = False  # the same vectors for all heads


class HeadSizes(FrozenConfig):
    """The division of a token among heads."""

    hidden_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    # Rank of each head's map from a token to its contribution. None: hidden_size / num_heads; hidden_size: full rank.
    value_rank: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> "HeadSizes":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        return self

    @property
    def head_size(self) -> int:
        """The numbers K in a head's queries and keys."""
        return self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """The numbers V in a head's values."""
        return self.head_size if self.value_rank is None else self.value_rank

    @property
    def values_size(self) -> int:
        """The numbers H V in the values of a token, of all heads."""
        return self.num_heads * self.value_size

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The numbers of a token's queries, keys and values in all heads."""
        return self.hidden_size, self.hidden_size, self.values_size


class HeadsConfig(HeadSizes):
    """The options of causal attention over heads: the steps before q, k and v, and those on them."""

    # Taps of a causal depthwise convolution over the input, before q, k and v; 0 switches it off.
    short_convolution: int = Field(default=4, ge=0, le=64)
    projection_bias: bool = False  # of q, k, v and the output
    rotary: RotaryConfig | None = None

    @model_validator(mode="after")
    def _rotary_fits(self) -> "HeadsConfig":
        if self.rotary is not None and self.rotary.size > self.head_size:
            raise ValueError(f"rotary.size {self.rotary.size} must be at most the head's size, {self.head_size}")
        return self


class MatricesConfig(HeadSizes):
    """The options of a feature map's random vectors."""

    num_random: int = Field(default=64, ge=1)
    seed: int = 0
    # Rows of a head's random matrix are orthogonal to each other, `head_size` at a time.
    orthogonal: bool = False
    # The matrices from which every head draws its own at every step of training; 0: each keeps the one it has.
    pool: int = Field(default=0, ge=0)

    @property
    def softmax_scale(self) -> float:
        """The scale of queries and keys that makes q.k come out as in softmax attention, q.k / sqrt(K)."""
        return float(self.head_size**-0.25)

    @model_validator(mode="after")
    def _pool_fits(self) -> "MatricesConfig":
        if 0 < self.pool < self.num_heads:
            raise ValueError(
                f"a pool of {self.pool} matrices is too small for {self.num_heads} heads, which all differ"
            )
        return self


class FeaturesConfig(MatricesConfig):
    """The options of random features of Gaussian and arc-cosine kernels."""

    feature: Literal["gaussian", "arc_cosine"] = "gaussian"
    # Queries and keys have unit norm, or keys weigh exp(|sigma k|^2 / 2) and neither is normalised.
    weighting: Literal["unit_norm", "norm"] = "unit_norm"
    # The value at which the learned sigma begins. None: 1 for unit norms; else softmax's scale, logits q.k / sqrt(K).
    sigma: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def first_sigma(self) -> float:
        """The value at which sigma begins."""
        if self.sigma is not None:
            return self.sigma
        return 1.0 if self.weighting == "unit_norm" else self.softmax_scale

    @model_validator(mode="after")
    def _features_fit(self) -> "FeaturesConfig":
        if self.weighting == "norm" and self.feature != "gaussian":
            raise ValueError(f"weighting 'norm' is that of the Gaussian kernel; feature is {self.feature!r}")
        return self


def check_key_weights(denominator: DenominatorConfig | None, what: str) -> None:
    """Refuse a fixed divisor for weighted keys, whose weights have no fixed unit.

    Raises: ValueError for a denominator that compares with a fixed number.
    """
    if denominator is not None and denominator.kind not in ("floor", "exact"):
        raise ValueError(
            f"{what} was given with the denominator {denominator.kind!r}, which compares with a fixed number; take "
            "'floor' or 'exact'"
        )
