"""ListOps: nested lists of digits under operators, as many as one likes, each a function of seed and index.

An expression is `[OP x1 x2 … ]`, where each x is a digit or an expression and OP is MIN, MAX, MED (the median, rounded
down) or SM (the sum modulo 10); its class is its value. A token is a digit, an operator with its bracket, or a closing
bracket:

    0 to 9   the digits        10  [MIN     11  [MAX     12  [MED     13  [SM     14  ]

Reference: Nangia and Bowman 2018 (ListOps); Tay et al. 2020, Long Range Arena, Sec. 2.2.1 (lengths 500 to 2,000, depth
and arguments up to 10; an argument is an expression with probability 1/4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import ConfigError

__all__ = ["NUM_CLASSES", "TOKEN_NAMES", "VOCAB_SIZE", "ListOps"]

TOKEN_NAMES = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
VOCAB_SIZE, NUM_CLASSES = len(TOKEN_NAMES), 10
_MIN, _MAX, _MED, _SM, _CLOSE = range(10, 15)
_NESTED_SHARE = 0.25
_TRIES = 100_000


@dataclass(frozen=True)
class ListOps:
    """Expressions of min_length to max_length tokens, nested up to max_depth, with 2 to max_args arguments.

    The outermost list has depth 1 and its arguments depth 2; what has depth max_depth is a digit. Drawn by rejection:
    expressions are drawn from the grammar until the length of one fits.
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
        """Append an expression; its value. One that is too long already is given up: it is drawn again."""
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
