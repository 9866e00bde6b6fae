"""Labelled sequences that are made up as they are read, as many as one likes, each a function of seed and index."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from dist_attn.errors import ConfigError
from dist_attn.training.datasets.config import DataConfig, register_data
from dist_attn.training.datasets.labelled_text import ReaderSizes, TextSets

TOKEN_NAMES = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
VOCAB_SIZE, NUM_CLASSES = len(TOKEN_NAMES), 10
_MIN, _MAX, _MED, _SM, _CLOSE = range(10, 15)
_NESTED_SHARE = 0.25
_TRIES = 100_000


@dataclass(frozen=True)
class ListOps:
    """Nested lists of digits under operators: min_length to max_length tokens, max_depth deep, 2 to max_args arguments.

    An expression is `[OP x1 x2 … ]`, where each x is a digit or an expression and OP is MIN, MAX, MED (the median,
    rounded down) or SM (the sum modulo 10); its class is its value. A token is a digit (0 to 9), an operator with its
    bracket (10 to 13) or a closing bracket (14): `TOKEN_NAMES`.

    The outermost list has depth 1 and its arguments depth 2; what has depth max_depth is a digit. Drawn by rejection:
    expressions are drawn from the grammar until the length of one fits.

    Reference: Nangia and Bowman 2018; Tay et al. 2020, Long Range Arena, Sec. 2.2.1 (lengths 500 to 2,000, depth and
    arguments up to 10; an argument is an expression with probability 1/4).
    """

    seed: int
    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    def __call__(self, index: int) -> tuple[NDArray[np.int64], int]:
        """The tokens of expression `index`, and its value.

        Raises: ConfigError where no expression of these lengths is found.
        """
        random = Random(f"listops {self.seed} {index}")  # of a string: the same in every process and version
        for _ in range(_TRIES):
            tokens: list[int] = []
            value = self._draw(random, 1, tokens)
            if self.min_length <= len(tokens) <= self.max_length:
                return np.array(tokens, dtype=np.int64), value
        raise ConfigError(
            f"{_TRIES} expressions of depth {self.max_depth} and up to {self.max_args} arguments were drawn, and none "
            f"has {self.min_length} to {self.max_length} tokens; widen data.min_length and data.max_length, or raise "
            "data.max_depth"
        )

    def _draw(self, random: Random, depth: int, tokens: list[int]) -> int:
        """Append an expression; returns its value. One that is too long already is given up: it is drawn again."""
        operator = random.randrange(_MIN, _CLOSE)
        tokens.append(operator)
        values = []
        for _ in range(random.randint(2, self.max_args)):
            if len(tokens) > self.max_length:
                return 0
            if depth + 1 < self.max_depth and random.random() < _NESTED_SHARE:
                values.append(self._draw(random, depth + 1, tokens))
            else:
                values.append(random.randrange(10))
                tokens.append(values[-1])
        tokens.append(_CLOSE)
        return _apply(operator, values)


def _apply(operator: int, values: Sequence[int]) -> int:
    match operator:
        case 10:
            return min(values)
        case 11:
            return max(values)
        case 12:
            return int(median(values))
    return sum(values) % 10


@dataclass(frozen=True)
class Needles:
    """Sequences of `length` tokens, 2 `copies` of which matter: needles in noise.

    Of all tokens `copies` are one symbol a of the first alphabet and `copies` one symbol b of the second, at random
    places; all others are noise. The class is a + b, so both needles have to be found, however far apart: a model
    that finds one of them, or none, has an accuracy of 1 / `symbols` at best. Tokens are

        0 to noise - 1    noise        noise + a    the first alphabet        noise + symbols + b    the second
    """

    seed: int
    length: int
    noise: int = 64
    symbols: int = 4
    copies: int = 4

    def __call__(self, index: int) -> tuple[NDArray[np.int64], int]:
        """The tokens of sequence `index`, and its class."""
        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(0, self.noise, self.length, dtype=np.int64)
        first, second = random.integers(0, self.symbols, 2).tolist()
        places = random.choice(self.length, 2 * self.copies, replace=False)
        tokens[places[: self.copies]] = self.noise + first
        tokens[places[self.copies :]] = self.noise + self.symbols + second
        return tokens, first + second

    @property
    def classes(self) -> int:
        """The number of sums that there are."""
        return 2 * self.symbols - 1

    @property
    def vocab_size(self) -> int:
        """The number of tokens: noise and both alphabets."""
        return self.noise + 2 * self.symbols


class ListOpsConfig(DataConfig):
    """Expressions made up as Long Range Arena does: `examples` of them, and others to validate."""

    kind: Literal["listops"] = "listops"
    seed: int = 0
    min_length: int = Field(default=500, ge=1)
    max_length: int = Field(default=2000, ge=4)
    max_depth: int = Field(default=10, ge=2, le=100)
    max_args: int = Field(default=10, ge=2)
    examples: int = Field(default=96_000, ge=1)
    validation_examples: int = Field(default=2000, ge=0)
    batch: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _range_fits(self) -> "ListOpsConfig":
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        return self


class NeedlesConfig(DataConfig):
    """Sequences made up of noise and a few tokens that matter, and others to validate."""

    kind: Literal["needles"] = "needles"
    seed: int = Field(default=0, ge=0)
    length: int = Field(default=65_536, ge=2)
    # The number of noise tokens; the two alphabets of needles come behind them.
    noise: int = Field(default=64, ge=1)
    # The symbols of either alphabet; there are 2 symbols - 1 classes.
    symbols: int = Field(default=4, ge=2)
    # The copies of each of the two needles.
    copies: int = Field(default=4, ge=1)
    examples: int = Field(default=96_000, ge=1)
    validation_examples: int = Field(default=200, ge=0)

    @model_validator(mode="after")
    def _needles_fit(self) -> "NeedlesConfig":
        if 2 * self.copies > self.length:
            raise ValueError(f"2 x copies {self.copies} are more needles than length {self.length} has places")
        return self


@dataclass(frozen=True)
class _MadeUp:
    sequences: ListOps | Needles
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[tuple[Tensor, ...], int]:
        tokens, value = self.sequences(self.first + number)
        return (torch.from_numpy(tokens),), value


def read_listops(data: ListOpsConfig, model: ReaderSizes, *_: object) -> TextSets:
    """Make expressions 0, 1, … to train on, and those after them to validate."""
    _check_sizes("ListOps", model, (VOCAB_SIZE, NUM_CLASSES))
    expressions = ListOps(data.seed, data.min_length, data.max_length, data.max_depth, data.max_args)
    expressions(0)  # lengths that there are not are refused now
    return _made_up(expressions, data, NUM_CLASSES)


def read_needles(data: NeedlesConfig, model: ReaderSizes, *_: object) -> TextSets:
    """Make sequences 0, 1, … to train on, and those after them to validate."""
    needles = Needles(data.seed, data.length, data.noise, data.symbols, data.copies)
    _check_sizes("of needles this [data]", model, (needles.vocab_size, needles.classes))
    return _made_up(needles, data, needles.classes)


def _made_up(sequences: ListOps | Needles, data: ListOpsConfig | NeedlesConfig, classes: int) -> TextSets:
    validation = _MadeUp(sequences, data.examples, data.validation_examples) if data.validation_examples else None
    return TextSets(_MadeUp(sequences, 0, data.examples), validation, tuple(range(classes)), None)


def _check_sizes(what: str, model: ReaderSizes, needed: tuple[int, int]) -> None:
    if (model.vocab_size, model.num_classes) != needed:
        raise ConfigError(
            f"model.vocab_size is {model.vocab_size} and model.num_classes {model.num_classes}; {what} has {needed[0]} "
            f"tokens and {needed[1]} classes"
        )


register_data(ListOpsConfig, read_listops)
register_data(NeedlesConfig, read_needles)
