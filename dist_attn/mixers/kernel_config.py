"""What causal attention by fixed and by exponential kernels is made of: frozen values with a `kind`."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.mixers.head_config import DenominatorConfig, HeadsConfig, MatricesConfig, check_key_weights

__all__ = ["EfficientConfig", "EluConfig", "PerformerConfig", "StaticKernelConfig"]


class _KernelConfig(HeadsConfig):
    """Kernels whose features are positive, so that a divisor is never small by chance."""

    # Only keeps 0 / 0 away where all weights have underflowed.
    denominator: DenominatorConfig = DenominatorConfig(kind="floor", eps=1e-12)
    # The state forgets by a gate of each head, or by one of all heads.
    gated: bool = False
    shared_gate: bool = False

    @model_validator(mode="after")
    def _gates_fit(self) -> "_KernelConfig":
        if self.shared_gate and not self.gated:
            raise ValueError("shared_gate was given to a mixer without gates; set gated = true")
        return self


class EluConfig(_KernelConfig):
    """Causal attention with the feature map elu + 1."""

    kind: Literal["elu"]


class EfficientConfig(_KernelConfig):
    """Causal attention by a softmax of queries over features and of keys over the tokens so far."""

    kind: Literal["efficient"]

    @model_validator(mode="after")
    def _divisor_fits(self) -> "EfficientConfig":
        check_key_weights(self.denominator, "attention by weighted keys")
        return self


class PerformerConfig(_KernelConfig, MatricesConfig):
    """Causal attention by positive random features."""

    kind: Literal["performer"]
    orthogonal: bool = True  # the paper's FAVOR+

    @model_validator(mode="after")
    def _divisor_fits(self) -> "PerformerConfig":
        check_key_weights(self.denominator, "attention by weighted keys")
        return self


class StaticKernelConfig(MatricesConfig):
    """phi(X) phi(X)^T X over the tokens so far or, `bidirectional`, over all; random features are of unit vectors."""

    kind: Literal["static_kernel"]
    num_heads: int = Field(default=1, ge=1)
    feature: Literal["elu", "gaussian", "arc_cosine"] = "elu"
    sigma: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # of random vectors
    # The sum of the weights, the number of tokens, or nothing, as the formula is printed.
    divisor: Literal["weights", "length", "none"] = "weights"
    bidirectional: bool = False

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return not self.bidirectional

    @property
    def num_features(self) -> int:
        """Numbers in phi of a head."""
        if self.feature == "elu":
            return self.head_size
        return self.num_random * (2 if self.feature == "gaussian" else 1)

    @model_validator(mode="after")
    def _nothing_is_projected(self) -> "StaticKernelConfig":
        if self.value_rank is not None:
            raise ValueError("value_rank was given to a static kernel, whose values are the tokens themselves")
        return self
