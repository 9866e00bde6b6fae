"""From what a user asks of an encoding to its rows: what is left out depends on how much a model reads at once."""

from dataclasses import dataclass
from typing import Literal

from dist_attn.errors import InputError
from dist_attn.wire.messages import RowSpec

__all__ = ["MODEL_POOLING", "RowChoiceError", "SequenceReading", "choose_rows"]

MODEL_POOLING = "model"
DEFAULT_WINDOW = 512
FIRST_TOKEN = "first"


class RowChoiceError(InputError):
    """Rows that this model does not give; `option` is the one that asks for them."""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True)
class SequenceReading:
    """How a text encoder reads: sequences of `text_tokens` at most, each made a vector by a pooling of its own."""

    text_tokens: int
    pooling: Literal["mean", "first"]


def choose_rows(granularity: str, window: int | None, pooling: str | None, reading: SequenceReading | None) -> RowSpec:
    """The rows of an encoding; None stands for what was left out. `reading` is None of models that read any length.

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
