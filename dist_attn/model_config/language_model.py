"""What a model is made of: the frozen value that a model folder's config.json holds."""

from typing import Any, Literal

from pydantic import Field, model_validator

from dist_attn.model_config.hybrid import StackMixer, check_streams, check_uses_all
from dist_attn.model_config.mixer import FrozenConfig
from dist_attn.shipped.foreign import OUR_MODEL_TYPE

MAX_LAYERS = 10_000
"""More are a mistake: they would be built one by one until memory ends."""

NAMES_FOR_OTHERS = {"model_type": OUR_MODEL_TYPE, "architectures": ["DistAttnForCausalLM"]}
"""What config.json says to transformers, where it is that of a language model."""


class NormConfig(FrozenConfig):
    """Each token's features to mean 0 and variance 1 (`layer`) or to a mean square of 1 (`rms`)."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = Field(default=1e-5, gt=0, allow_inf_nan=False)


class MlpConfig(FrozenConfig):
    """out(f(in(x))), or out(f(gate(x)) * in(x)), where gate and in lie one above the other in one matrix."""

    kind: Literal["plain", "gated"] = "plain"
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu_tanh"
    bias: bool = True


class BlockConfig(FrozenConfig):
    """What surrounds the mixer in a layer; `parallel`: the MLP reads the layer's input, not the mixer's output.

    `norm_placement`: norms before the mixer and the MLP (`pre`), or after each has been added to its input (`post`).
    """

    norm: NormConfig = NormConfig()
    norm_placement: Literal["pre", "post"] = "pre"
    mlp: MlpConfig = MlpConfig()
    residual: Literal["sequential", "parallel"] = "sequential"

    @model_validator(mode="after")
    def _norms_have_a_place(self) -> "BlockConfig":
        if self.norm_placement == "post" and self.residual == "parallel":
            raise ValueError("norms after mixer and MLP need these one after the other: residual = sequential")
        return self


class LearnedPositions(FrozenConfig):
    """A vector for each of the first `length` positions; longer texts are refused, or begin again with the first."""

    kind: Literal["learned"] = "learned"
    length: int = Field(ge=1)
    beyond: Literal["refuse", "repeat"] = "refuse"


TokenPositions = Literal["none", "sinusoidal", "concatenated"] | LearnedPositions
"""Positions of tokens that a state goes on from: nothing, sinusoids added or behind the token, or learned vectors."""


class LanguageModelConfig(FrozenConfig):
    """A causal language model over any mixer that goes on from a state, or several kinds of them."""

    kind: Literal["language_model"] = "language_model"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    mlp_size: int = Field(ge=1)
    mixer: StackMixer
    positions: TokenPositions = "none"
    block: BlockConfig = BlockConfig()
    # The read-out has the embedding's weights, or a matrix of its own.
    readout: Literal["tied", "own"] = "tied"

    @model_validator(mode="before")
    @classmethod
    def _names_for_others(cls, values: Any) -> Any:
        """Without the keys that say to transformers which classes read this file (`dist_attn.hf`)."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if (key, value) not in NAMES_FOR_OTHERS.items()}

    @model_validator(mode="after")
    def _sizes_agree(self) -> "LanguageModelConfig":
        if self.mixer.hidden_size != self.hidden_size:
            raise ValueError(
                f"the mixer's hidden_size {self.mixer.hidden_size} must equal the model's {self.hidden_size}"
            )
        check_uses_all(self.mixer, self.num_layers)
        check_streams(self.mixer, "language model")
        return self
