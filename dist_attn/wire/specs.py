"""What is asked of an engine: the rows of an encoding, how tokens are drawn, and what is told about a draw."""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from dist_attn.errors import InputError
from dist_attn.wire.message import Count

__all__ = ["RowSpec", "SamplingSpec", "TokenLogprobs", "check_sampling"]

_LARGEST = 1 << 53  # as in the messages: whole numbers that every JSON reader keeps exact


class RowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rows an encoding returns: one per token, per window of `window` tokens, or one in all.

    `pooling` is `model` for models that make a vector of a whole sequence in a way of their own.
    """

    granularity: Annotated[str, Meta(pattern="^(token|window|document)$")] = "window"
    window: Annotated[int, Meta(ge=1, le=1 << 53)] = 512
    pooling: Annotated[str, Meta(pattern="^(mean|last|model)$")] = "mean"


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drawn; temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filters off.

    `logprobs` asks for the log-probability of every drawn token and of so many likeliest ones; None asks for none.
    `logit_bias` is added to the logits of these tokens; the penalties are subtracted from those of tokens that were
    drawn before, once and once for each time. The end token is not drawn before `min_tokens` others; with `ignore_eos`
    it is a token like any other. `prompt_logprobs` asks for what `logprobs` asks for, of every token of the prompt
    but the first, given those before it. With `max_tokens` 0 the prompt is read and no token is drawn.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=1 << 53)]
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[Count, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    min_tokens: Count = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def ends(self, token: int, end_token: int | None) -> bool:
        """Whether this drawn token ends the text."""
        return token == end_token and not self.ignore_eos

    def barred(self, end_token: int | None, drawn: int) -> int | None:
        """The token that must not follow so many drawn ones."""
        return end_token if drawn < self.min_tokens and not self.ignore_eos else None

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on the tokens that were drawn before it other than through the model."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def adjusts(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        return self.penalises or bool(self.logit_bias)


def check_sampling(spec: SamplingSpec) -> None:
    """Refuse a specification that no draw can follow.

    Raises: InputError naming the value, what is accepted, and what switches the filter off.
    """
    if not 1 <= spec.max_tokens <= _LARGEST:
        raise InputError(f"max_tokens is {spec.max_tokens}; it must be at least 1 (and at most {_LARGEST})")
    if not 0 <= spec.min_tokens <= spec.max_tokens:
        raise InputError(f"min_tokens is {spec.min_tokens}; it must be from 0 to max_tokens ({spec.max_tokens})")
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        raise InputError(
            f"temperature is {spec.temperature}; it must be a finite number, 0 or more (0 takes the likeliest token)"
        )
    if not 0 <= spec.top_k <= _LARGEST:
        raise InputError(f"top_k is {spec.top_k}; it must be 0 (off) or the number of likeliest tokens to draw from")
    if not 0 < spec.top_p <= 1:
        raise InputError(f"top_p is {spec.top_p}; it must be above 0 and at most 1 (1 switches the filter off)")
    if not 0 <= spec.min_p <= 1:
        raise InputError(f"min_p is {spec.min_p}; it must be from 0 to 1 (0 switches the filter off)")
    if spec.seed is not None and not -(1 << 63) <= spec.seed < 1 << 63:
        raise InputError(f"seed is {spec.seed}; it must fit into 64 bits: from -2**63 to 2**63 - 1")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(spec, name)
        if not -2 <= penalty <= 2:
            raise InputError(f"{name} is {penalty}; it must be from -2 to 2 (0 switches it off)")
    for token, bias in spec.logit_bias.items():
        if token < 0 or not -100 <= bias <= 100:
            raise InputError(f"logit_bias of token {token} is {bias}; it must be a known token's, from -100 to 100")


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Natural log-probabilities where one token was drawn: its own, and those of the likeliest, in falling order.

    They are the model's own, before biases, penalties, temperature and filters.
    """

    drawn: float
    top_tokens: list[Count] = []
    top_logprobs: list[float] = []
