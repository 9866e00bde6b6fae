"""The options and costs of performer and of efficient attention, causal and over all keys."""

from dataclasses import replace
from typing import Literal

from dist_attn.model_config.figures import TokenFlops
from dist_attn.model_config.mixer import register_mixer
from dist_attn.model_config.mixers.attention import AttentionKind, register_attention
from dist_attn.model_config.mixers.heads import MatricesConfig
from dist_attn.model_config.mixers.kernels import PositiveConfig


class EfficientConfig(PositiveConfig):
    """Causal attention by a softmax of queries over features and of keys over the tokens so far.

    It walks twice, once for the means of its keys, with one feature and M values: M + 3 numbers more travel.
    """

    kind: Literal["efficient"]

    @property
    def weighs_keys(self) -> bool:
        """Return True: keys are weighed by their largest number."""
        return True

    @property
    def mean_numbers(self) -> int:
        """The numbers of the second walk's state."""
        return self.num_features + 3

    @property
    def tensors(self) -> int:
        """The number of tensors of [B, L, D]; the second walk makes two more."""
        return super().tensors + 2


class PerformerConfig(PositiveConfig, MatricesConfig):
    """Causal attention by positive random features."""

    kind: Literal["performer"]
    orthogonal: bool = True  # the paper's FAVOR+

    @property
    def num_features(self) -> int:
        """The number of features: one for every random vector."""
        return self.num_random

    @property
    def random_vectors(self) -> int:
        """The number of random vectors of each head."""
        return self.num_random

    @property
    def weighs_keys(self) -> bool:
        """Return True: keys are weighed by their largest feature."""
        return True

    def prefill_flops(self, tokens: int, ranks: int = 1) -> TokenFlops:
        """The operations; the weights of keys are found first, by the random vectors once more."""
        parts = super().prefill_flops(tokens, ranks)
        return replace(parts, features=parts.features + 2.0 * self.hidden_size * self.num_random)


register_mixer(EfficientConfig, "dist_attn_papers.mixers.efficient:EfficientAttention")
register_mixer(PerformerConfig, "dist_attn_papers.mixers.performer:PerformerAttention")
register_attention(
    "efficient",
    AttentionKind(EfficientConfig, "dist_attn_papers.mixers.efficient:EfficientOverAllKeys", weighs_keys=True),
)
register_attention(
    "performer",
    AttentionKind(
        PerformerConfig,
        "dist_attn_papers.mixers.performer:PerformerOverAllKeys",
        options=("pool", "orthogonal"),
        defaults={"orthogonal": True},
        weighs_keys=True,
    ),
)
