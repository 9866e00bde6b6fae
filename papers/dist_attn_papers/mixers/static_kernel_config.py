"""Mixing by a static kernel of the tokens themselves: its options and costs."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.figures import TokenFlops, Weights
from dist_attn.model_config.mixer import register_mixer
from dist_attn.model_config.mixers.heads import MatricesConfig
from dist_attn.model_config.mixers.kernels import KernelCosts


class StaticKernelConfig(MatricesConfig, KernelCosts):
    """The mixer phi(X) phi(X)^T X over the tokens so far or, `bidirectional`, all; random features: of unit vectors."""

    forms = {"": {}, "over all keys": {"bidirectional": True}}  # noqa: RUF012

    kind: Literal["static_kernel"]
    num_heads: int = Field(default=1, ge=1)
    feature: Literal["elu", "gaussian", "arc_cosine"] = "elu"
    sigma: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # of random vectors
    # The divisor: the sum of the weights, the number of tokens, or nothing, as the formula is printed.
    divisor: Literal["weights", "length", "none"] = "weights"
    bidirectional: bool = False

    @property
    def causal(self) -> bool:
        """Return whether no token sees a later one."""
        return not self.bidirectional

    @property
    def num_features(self) -> int:
        """The number of features in phi of a head."""
        if self.feature == "elu":
            return self.head_size
        return self.num_random * (2 if self.feature == "gaussian" else 1)

    @property
    def random_vectors(self) -> int:
        """The number of random vectors of each head."""
        return 0 if self.feature == "elu" else self.num_random

    @property
    def tensors(self) -> int:
        """The number of tensors of [B, L, D]; there are no q, k and v."""
        return 5

    def weights(self) -> Weights:
        """The weights, all of them fixed: nothing is learned."""
        return Weights(buffers=self.random_vectors * self.hidden_size)

    def state_bytes(self, position: int = 0, batch: int = 1) -> int:
        """The bytes of the state; none over all keys, as a later token could not go on from it."""
        return 0 if self.bidirectional else super().state_bytes(position, batch)

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations; over all keys without scores inside a chunk, and no rank walks its keys a second time."""
        if self.bidirectional:
            return replace(super().prefill_flops(tokens), scores=0.0)
        return super().prefill_flops(tokens, ranks)

    @model_validator(mode="after")
    def _nothing_is_projected(self) -> "StaticKernelConfig":
        if self.value_rank is not None:
            raise ValueError("value_rank was given to a static kernel, whose values are the tokens themselves")
        return self


register_mixer(StaticKernelConfig, "dist_attn_papers.mixers.static_kernel:static_kernel")
