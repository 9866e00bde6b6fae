"""The parts of messages that state a request: its rows, its draws, its priority and its deadline."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dist_attn.errors import InputError

_LARGEST = 1 << 53  # as in the messages: whole numbers that every JSON reader keeps exact
PRIORITIES = ("high", "normal", "low")
"""The classes, the most urgent first; a message carries the place in this list."""
MODEL_POOLING = "model"
DEFAULT_WINDOW = 512
FIRST_TOKEN = "first"
MOST_END_TOKENS = 64
CALLER_LENGTH = 16
LONGEST_GRAMMAR = 1 << 15
# Bounds on what a decoded message holds; a value outside is refused as a WireError before anybody counts with it.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
LONGEST_TEXT = 1 << 52
"""The most tokens of a text and all that is drawn after it: half the largest Count, so credit beyond it is one too."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every message: a frozen, tagged value; unknown fields are refused."""


class RowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows that an encoding returns: one per token, per window of `window` tokens, one in all, or at marked tokens.

    Marked rows have any length: the last token of each travels as its complement, ~token. `pooling` is `model` for
    models that make a vector of a whole sequence in a way of their own.
    """

    granularity: Annotated[str, Meta(pattern="^(token|window|document|sentence|paragraph|chapter|boundaries)$")] = (
        "window"
    )
    window: Annotated[int, Meta(ge=1, le=1 << 53)] = 512
    pooling: Annotated[str, Meta(pattern="^(mean|last|model)$")] = "mean"

    @property
    def marked(self) -> bool:
        """Return whether marks of tokens say where rows end."""
        return self.granularity not in ("token", "window", "document")


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The way in which tokens are drawn; temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filters off.

    `logprobs` asks for the log-probability of every drawn token and of so many likeliest ones; None asks for none.
    `logit_bias` is added to the logits of these tokens; the penalties are subtracted from those of tokens that were
    drawn before, once and once for each time. No end token is drawn before `min_tokens` others; with `ignore_eos` they
    are tokens like any other. `prompt_logprobs` asks for what `logprobs` asks for, of every token of the prompt
    but the first, given those before it. With `max_tokens` 0 the prompt is read and no token is drawn.

    `repetition_penalty` divides logits above 0 of tokens that were drawn or are among `prompt_tokens`, and multiplies
    others. These are int32, each once, so at most the vocabulary; they stand here because a replay begins from here.
    `grammar` is what the text follows, as `text.grammars` writes it: no other tokens are drawn, an end token only where
    it may end.
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
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    prompt_tokens: bytes = b""
    grammar: Annotated[str, Meta(max_length=LONGEST_GRAMMAR)] = ""

    def after(self, prompt: Sequence[int] | NDArray[np.integer[Any]]) -> "SamplingSpec":
        """Note the tokens that a text begins with, where they count."""
        if self.repetition_penalty == 1:
            return self
        return msgspec.structs.replace(self, prompt_tokens=np.unique(np.asarray(prompt, np.int32)).tobytes())

    def ended_by(self, end_tokens: Collection[int]) -> Collection[int]:
        """The end tokens of a model that end this text."""
        return () if self.ignore_eos else end_tokens

    @property
    def penalises(self) -> bool:
        """Return whether earlier draws change a token's logits other than through the model."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def adjusts(self) -> bool:
        """Return whether tokens are drawn from other logits than the model's."""
        return self.penalises or bool(self.logit_bias)


def tokens_with_room(tokens: int) -> int:
    """The most tokens for which a cache of keys and values has memory when it holds `tokens` and is drawn from.

    Such a cache has spare room behind its tokens; when that is full, it is copied into a larger one.
    """
    return tokens + max(64, tokens // 4)


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
    if not 0.01 <= spec.repetition_penalty <= 100:
        raise InputError(f"repetition_penalty is {spec.repetition_penalty}; it must be from 0.01 to 100 (1 is off)")
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


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms of a request: its priority, its deadline, the length of its input, and the caller whose share it takes.

    Units: seconds from when the controller takes the message; tokens, None where their number is not known yet.
    With `progress` the controller tells how far the input has been read. `caller` tells callers apart and nothing else.
    """

    priority: Annotated[int, Meta(ge=0, lt=len(PRIORITIES))] = 1
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    tokens: Count | None = None
    progress: bool = False
    caller: Annotated[str, Meta(max_length=CALLER_LENGTH)] = ""


class Progress(Message, frozen=True):
    """The input has been read up to (not including) position `processed`; only where `Terms.progress` asks for it."""

    request_id: Name
    processed: Count


class RowChoiceError(InputError):
    """A refusal of rows that this model does not give; `option` is the one that asks for them."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class SequenceReading:
    """The reading of a text encoder: sequences of `text_tokens` at most, each made one vector by its own pooling."""

    text_tokens: int
    pooling: Literal["mean", "first"]


def choose_rows(granularity: str, window: int | None, pooling: str | None, reading: SequenceReading | None) -> RowSpec:
    """Choose the rows of an encoding; None: not given. `reading` is None for models that read texts of any length.

    Raises: RowChoiceError for rows that this model does not give.
    """
    if reading is None:
        return RowSpec(granularity, window or DEFAULT_WINDOW, pooling or "mean")
    longest = reading.text_tokens
    if granularity == "document":
        raise RowChoiceError(
            f"granularity=document is not offered by this model, which reads {longest} tokens at once: take window "
            "for a vector per window; a text that is no longer has its vector in /v1/embeddings",
            "granularity",
        )
    if window is not None and granularity == "window" and window > longest:
        raise RowChoiceError(f"window={window} is over the {longest} tokens that this model reads at once", "window")
    if pooling not in (None, reading.pooling):
        raise RowChoiceError(
            f"pooling={pooling} is not offered: this model pools by {_in_words(reading.pooling)}; leave it out",
            "pooling",
        )
    return RowSpec(granularity, min(window or DEFAULT_WINDOW, longest), MODEL_POOLING)


def _in_words(pooling: str) -> str:
    return "its first token" if pooling == FIRST_TOKEN else "the mean"
