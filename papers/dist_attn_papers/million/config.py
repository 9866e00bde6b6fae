"""The configuration of a million-scale sparse model: the frozen values of its config.json."""

from typing import Literal

from pydantic import Field, model_validator

from dist_attn.model_config.language_model import MAX_LAYERS
from dist_attn.model_config.model import ModelConfig, register_model
from dist_attn.model_config.registry import FrozenConfig


class SelectorConfig(FrozenConfig):
    """The choice of tokens that go on: those whose score reaches `threshold`, at test in every mode but `top_k`.

    The modes make the decision differentiable in training (m is the weight of a kept token):
    `straight_through`: 1, with the gradient of sigmoid((p - threshold) / temperature).
    `soft`: that sigmoid itself; no token is dropped in training.
    `gumbel`: 1 with the gradient of a Gumbel-sigmoid, and kept where that is above 1/2.
    `hard_concrete`: the stretched and clipped Gumbel-sigmoid, kept where it is above 0 (Louizos et al. 2018).
    `top_k`: the score p; a share of `rate` is kept, at test too, and there is no threshold.
    """

    threshold: float = Field(default=0.5, gt=0, lt=1)
    gate: Literal["straight_through", "soft", "gumbel", "hard_concrete", "top_k"] = "straight_through"
    # The share of tokens to keep. `rate_weight` (mean m - rate)^2 is added to the loss; `above` counts only what is
    # over it. Without this term the likelihood keeps everything and its opposite drops everything.
    rate: float = Field(default=0.1, gt=0, le=1)
    rate_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    rate_penalty: Literal["around", "above"] = "around"
    # The steps of training until the rate term counts in full: no token is dropped before it is known which.
    rate_warmup: int = Field(default=0, ge=0)
    # The temperature goes from the first to the second over `anneal_steps` steps of training, geometrically.
    temperature: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    final_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    anneal_steps: int = Field(default=1000, ge=1)
    # Features of a hidden layer of the score; None: the score is linear in the token.
    hidden_size: int | None = Field(default=None, ge=1)
    # The height above the threshold at which the scores' logits begin: at first everything is kept.
    initial_logit: float = Field(default=1.0, allow_inf_nan=False)
    # The most tokens of a sequence that are kept, those with the highest scores.
    most_tokens: int | None = Field(default=None, ge=1)
    # The Selector learns nothing, for a predictor that is trained once more under a Selector that stays.
    frozen: bool = False
    seed: int = 0


class RouterConfig(FrozenConfig):
    """The choice of experts for a kept token: the `choices` likeliest of `num_experts`.

    An expert has room for ceil(capacity_factor choices N / num_experts) of N kept tokens, and never for more than
    `most_tokens`; a token without room goes on unchanged. The gate of one choice is its probability (Switch), of two
    their shares of each other (GShard).
    """

    num_experts: int = Field(default=1, ge=1)
    choices: Literal[1, 2] = 1
    capacity_factor: float = Field(default=1.25, gt=0, allow_inf_nan=False)
    most_tokens: int | None = Field(default=None, ge=1)
    # The weight of E sum_e f_e P_e, which is least where experts are chosen equally often.
    balance_weight: float = Field(default=0.01, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _choices_fit(self) -> "RouterConfig":
        if self.choices > self.num_experts:
            raise ValueError(f"choices {self.choices} is over num_experts {self.num_experts}")
        return self


class UpsamplingConfig(FrozenConfig):
    """The filling of positions between kept tokens: on the line between them, or from the nearest ones."""

    kind: Literal["linear", "knn"] = "linear"
    neighbours: int = Field(default=3, ge=1)


class MillionConfig(ModelConfig):
    """A model of a Selector, layers of experts over what it keeps, Fourier mixing, up-sampling, and a head."""

    kind: Literal["million"] = "million"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(default=1, ge=1, le=MAX_LAYERS)
    num_heads: int = Field(ge=1)
    mlp_size: int = Field(ge=1)
    # The taps of a centred convolution before the Selector, which sees that many tokens; 1: each token alone.
    context: int = Field(default=1, ge=1)
    selector: SelectorConfig = SelectorConfig()
    router: RouterConfig = RouterConfig()
    positions: Literal["none", "sinusoidal"] = "sinusoidal"
    # Mixes every kept token with every other by the Fourier transform, behind the experts.
    global_mixing: bool = True
    upsampling: UpsamplingConfig = UpsamplingConfig()
    # Classes of the head; None: an encoder without one.
    num_classes: int | None = Field(default=None, ge=1)
    # The vector of a sequence is the mean over kept tokens, or over all positions after up-sampling.
    pooling: Literal["kept", "all"] = "kept"
    # Eq. 27: everything is learnt for the likelihood; Eq. 28: the Selector is learnt against it.
    objective: Literal["likelihood", "adversarial"] = "likelihood"
    # Longer sequences are refused; `encode` cuts a text into sequences of so many tokens.
    max_tokens: int = Field(default=1 << 20, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> "MillionConfig":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        return self


register_model(
    MillionConfig, "dist_attn_papers.million.model:MillionModel", plan="dist_attn_papers.million.plan:plan_million"
)
